"""The small files beside the weights: tokenizer, special tokens, templates, chat markers, vision shape.

What each holds is docs/FORMAT.md's table of files. Sidecars are planned first (so that a dry run can
tell what is missing) and published with the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from container.errors import SourceError
from container.layout import CHAT_NAME, SPECIALS_NAME, TOKENIZER_NAME, TOKENIZER_SOURCES, VISION_NAME
from container.strict_json import json_bytes, parse_object
from convert.arch.base import Architecture

# nn.RMSNorm(eps=None) as torch computes it for f32, f16 and bf16 (docs/MODELS.md 4)
VISION_NORM_EPS = 1.1920929e-7
# What an image may cost a prompt, as readers take it where nobody says otherwise: 1,024 patches are 256 positions.
# The release's own limit goes into `in_patch_limit`; as a budget it would ask for attention over 65,536 patches.
MAX_PATCHES = 1024
MEDIA_KEYS = ("image_mean", "image_std", "patch_size", "in_patch_limit", "patch_limit_on_one_side")


@dataclass(frozen=True)
class Sidecars:
    """Contents by file name, and what a user should know about files that could not be made."""

    files: Mapping[str, bytes]
    notes: tuple[str, ...] = ()


@dataclass
class _Collector:
    folder: Path
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan_sidecars(folder: Path, architecture: Architecture) -> Sidecars:
    """Everything but the weights that `folder` lets us write. Raises SourceError for a malformed file."""
    found = _Collector(folder)
    tokenizer_config = _json(folder / "tokenizer_config.json")
    _tokenizer(found, tokenizer_config)
    _chat_template(found, tokenizer_config)
    _chat_markers(found)
    _vision(found, architecture)
    return Sidecars(found.files, tuple(found.notes))


def _tokenizer(found: _Collector, tokenizer_config: dict[str, Any] | None) -> None:
    for name in TOKENIZER_SOURCES:
        if (found.folder / name).is_file():
            found.files[TOKENIZER_NAME] = (found.folder / name).read_bytes()
            break
    else:
        found.notes.append(f"no {' or '.join(TOKENIZER_SOURCES)} in the checkpoint: the container will take ids only")
    if tokenizer_config is None:
        found.notes.append("no tokenizer_config.json in the checkpoint: the container will have no special tokens")
        return
    added = tokenizer_config.get("added_tokens_decoder", {})
    try:
        specials = [{"id": int(number), "text": token["content"]} for number, token in added.items()]
        if not all(isinstance(special["text"], str) for special in specials):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise SourceError(
            f"{found.folder / 'tokenizer_config.json'}: added_tokens_decoder must map ids to objects with `content`"
        ) from None
    found.files[SPECIALS_NAME] = json_bytes(sorted(specials, key=lambda special: int(special["id"])))


def _chat_template(found: _Collector, tokenizer_config: dict[str, Any] | None) -> None:
    name = "chat_template.jinja"
    if (found.folder / name).is_file():
        found.files[name] = (found.folder / name).read_bytes()
    elif isinstance((tokenizer_config or {}).get("chat_template"), str):
        found.files[name] = (tokenizer_config or {})["chat_template"].encode()


def _chat_markers(found: _Collector) -> None:
    """chat.json, for a tokenizer that really has the markers (docs/MODELS.md 5.4 and 5.5)."""
    specials = {special["text"] for special in json.loads(found.files.get(SPECIALS_NAME, b"[]"))}
    if {"<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"} <= specials:
        roles = {role: [f"<|im_{role}|>{role}<|im_middle|>", "<|im_end|>"] for role in ("system", "user", "assistant")}
        found.files[CHAT_NAME] = json_bytes({**roles, "open": roles["assistant"][0]})
    elif {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"} <= specials:
        # The markers can express no thinking channel, so the assistant answers in its response channel.
        end = "<|close|>message<|sep|><|end_of_msg|>"
        chat: dict[str, Any] = {
            role: [f'<|open|>message role="{role}"<|sep|>', end] for role in ("system", "user", "assistant")
        }
        opened = f"{chat['assistant'][0]}<|open|>response<|sep|>"
        chat["assistant"] = [opened, f"<|close|>response<|sep|>{end}"]
        found.files[CHAT_NAME] = json_bytes({**chat, "open": opened})


def _vision(found: _Collector, architecture: Architecture) -> None:
    outer = architecture.config.get("_outer") or {}
    vision = outer.get("vision_config")
    if vision is None:
        return
    shape = {key: value for key, value in vision.items() if not key.startswith("_")}
    shape["vt_rms_eps"] = VISION_NORM_EPS
    shape["media_placeholder_token_id"] = outer.get("media_placeholder_token_id")
    media = (_json(found.folder / "preprocessor_config.json") or {}).get("media_proc_cfg")
    if not isinstance(media, dict):
        found.notes.append("no preprocessor_config.json with media_proc_cfg: vision.json will lack the image rules")
        media = {}
    shape |= {key: media[key] for key in MEDIA_KEYS if key in media}
    shape["max_patches"] = MAX_PATCHES
    found.files[VISION_NAME] = json_bytes(shape)


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return parse_object(path.read_bytes())
    except ValueError as error:
        raise SourceError(f"{path}: not valid JSON ({error})") from None
