"""Where the model comes from: a local folder, or a hub id that vLLM fetches."""

from pathlib import Path

from lmi_config.settings import SettingsError

_DESCRIPTIONS = ("config.json", "params.json")  # Hugging Face's, Mistral's


def check(model_id: str) -> None:
    """Raise SettingsError when `model_id` is a local folder that is missing or holds no model."""
    folder = Path(model_id)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in _DESCRIPTIONS):
            wanted = " or ".join(_DESCRIPTIONS)
            raise SettingsError([f"OPTION_MODEL_ID={model_id!r}: the folder has no {wanted}"])
    elif model_id.startswith(("/", ".", "~")):
        raise SettingsError(
            [
                f"OPTION_MODEL_ID={model_id!r}: there is no such folder; give a folder with a "
                "model or a Hugging Face hub id like Qwen/Qwen3-0.6B"
            ]
        )
