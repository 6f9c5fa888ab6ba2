"""``malleable push`` puts a trained network into a folder or on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from malleable.inference.load import FILES, HUB, load_trained
from malleable.inference.share import check_taken, share


def push(
    checkpoint: str,
    target: str,
    license: str | None = None,
    base_model: str | None = None,
    private: bool = False,
    overwrite: bool = False,
    trust: bool = False,
) -> None:
    """Share a trained network: model.safetensors, config.json and a model card, and nothing else.

    The card tells the data set, the scores of results.json with their protocol, also as the hub's model-index, what
    evaluate --stress found, and the limits. The hub's token is taken from HF_TOKEN or from 'hf auth login'.

    Args:
        checkpoint: a checkpoint, a run's folder, a folder with model.safetensors and config.json, or hf://owner/name.
        target: a folder, or hf://owner/name, a repository on the Hugging Face hub.
        license: of the weights, as the hub names it, for example apache-2.0.
        base_model: the network on the hub that training began with, for example timm/resnet50.a1_in1k.
        private: make a new repository private; one that is public is refused.
        overwrite: replace files that the folder or the repository holds.
        trust: import the package.module:factory that the checkpoint names as its network, and run it.
    """
    name = target.removeprefix(HUB)
    if target.startswith(HUB) and name.count("/") != 1:
        raise ValueError(f"target must be a folder or hf://OWNER/NAME, got {target!r}")
    trained = load_trained(checkpoint, "cpu", trust)
    about: dict[str, Any] = {"license": license, "base_model": base_model, "name": Path(target).resolve().name}
    if not target.startswith(HUB):
        share(trained, Path(target), overwrite, **about)
        print(f"{target} is ready; 'malleable pull {target} OUT' and every command that takes a checkpoint read it")
        return
    if trained.scores is None:
        print("note: the card has no scores; 'malleable evaluate' measures them")
    from huggingface_hub import HfApi

    api = HfApi()
    with TemporaryDirectory() as temporary:
        share(trained, Path(temporary), **about)
        try:
            if api.repo_exists(name):
                check_repository(api.repo_info(name), target, private, overwrite)
            repository = api.create_repo(name, private=private, exist_ok=True).repo_id
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=temporary,
                allow_patterns=list(FILES),
                commit_message="Weights and config",
            )
        except FileExistsError:
            raise
        except Exception as error:  # of whichever library the hub's client speaks HTTP with
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise RuntimeError(
                f"{target} could not be written: {reason}. The hub must be reached, and HF_TOKEN or 'hf auth login' "
                "give a token that may write there"
            ) from error
    print(f"{repository} is on the hub: {commit}")


def check_repository(found: Any, target: str, private: bool, overwrite: bool) -> None:
    """Raise if what is on the hub would be replaced unasked, or seen by all against the user's will."""
    if private and not found.private:
        raise FileExistsError(
            f"{target} is there and public, so private has no effect; make it private on the hub first"
        )
    check_taken(target, sorted({file.rfilename for file in found.siblings or ()} & {*FILES}), overwrite)
