"""The page of ``malleable explore``: which neighbours a layer takes, and what a network makes of them."""
