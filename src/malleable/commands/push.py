"""``malleable push`` puts a trained network into a folder or on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from malleable.inference.load import FILES, HUB, load_trained
from malleable.inference.share import share


def push(checkpoint: str, target: str, private: bool = False, overwrite: bool = False, trust: bool = False) -> None:
    """Share a trained network: model.safetensors, config.json and a model card, and nothing else.

    The hub's token is taken from HF_TOKEN or from 'hf auth login'.

    Args:
        checkpoint: a checkpoint, a run's folder, a folder with model.safetensors and config.json, or hf://owner/name.
        target: a folder, or hf://owner/name, a repository on the Hugging Face hub.
        private: make a new repository private.
        overwrite: replace files that the folder holds.
        trust: import the package.module:factory that the checkpoint names as its network, and run it.
    """
    trained = load_trained(checkpoint, "cpu", trust)
    if not target.startswith(HUB):
        share(trained, Path(target), overwrite)
        print(f"{target} is ready; 'malleable pull {target} OUT' and every command that takes a checkpoint read it")
        return
    from huggingface_hub import HfApi

    api = HfApi()
    with TemporaryDirectory() as temporary:
        share(trained, Path(temporary))
        repository = api.create_repo(target.removeprefix(HUB), private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repository, folder_path=temporary, allow_patterns=list(FILES), commit_message="Weights and config"
        )
    print(f"{repository} is on the hub: {commit}")
