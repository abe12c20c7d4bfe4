"""Every small file of the container's table: what it holds, and what is said when it cannot be made."""

from __future__ import annotations

import json

import pytest

from container.errors import SourceError
from container.model import ModelConfig
from convert.arch import detect
from convert.sidecars import plan_sidecars
from tests.checkpoints import k3_config, kimi_linear_config
from tests.checkpoints.folder import write_side_files
from tests.checkpoints.tokenizer import CHAT_TEMPLATE, rank_file, special_tokens
from tests.convert.small import edit_json


@pytest.fixture
def k3_folder(tmp_path):
    write_side_files(tmp_path, k3_config())
    return tmp_path


@pytest.fixture
def linear_folder(tmp_path):
    write_side_files(tmp_path, kimi_linear_config())
    return tmp_path


def planned(folder, config=None):
    config = json.loads((folder / "config.json").read_text()) if config is None else config
    return plan_sidecars(folder, detect(config))


def test_files_of_k3(k3_folder):
    found = planned(k3_folder)
    assert sorted(found.files) == ["chat.json", "specials.json", "tokenizer.model", "vision.json"]
    assert found.notes == ()


def test_files_of_kimi_linear(linear_folder):
    found = planned(linear_folder)
    assert sorted(found.files) == ["chat.json", "chat_template.jinja", "specials.json", "tokenizer.model"]
    assert found.files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert found.notes == ()


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
def test_the_rank_file_is_copied_byte_by_byte(k3_folder, name):
    (k3_folder / "tiktoken.model").rename(k3_folder / name)
    assert planned(k3_folder).files["tokenizer.model"] == rank_file()


def test_of_two_rank_files_tiktokens_is_taken(k3_folder):
    (k3_folder / "tokenizer.model").write_bytes(b"sentencepiece")
    assert planned(k3_folder).files["tokenizer.model"] == rank_file()


def test_specials_are_sorted_by_number(k3_folder):
    edit_json(k3_folder / "tokenizer_config.json", lambda c: c["added_tokens_decoder"].update({"9": {"content": "é"}}))
    specials = json.loads(planned(k3_folder).files["specials.json"])
    expected = [{"id": 9, "text": "é"}, *({"id": n, "text": t} for n, t in special_tokens("kimi_k3").items())]
    assert specials == expected


def test_a_template_inside_the_tokenizer_config(linear_folder):
    (linear_folder / "chat_template.jinja").unlink()
    edit_json(linear_folder / "tokenizer_config.json", lambda c: c.update(chat_template="{{ x }}"))
    assert planned(linear_folder).files["chat_template.jinja"] == b"{{ x }}"


def test_chat_markers_of_kimi_linear(linear_folder):
    chat = json.loads(planned(linear_folder).files["chat.json"])
    assert chat == {
        "system": ["<|im_system|>system<|im_middle|>", "<|im_end|>"],
        "user": ["<|im_user|>user<|im_middle|>", "<|im_end|>"],
        "assistant": ["<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"],
        "open": "<|im_assistant|>assistant<|im_middle|>",
    }


def test_chat_markers_of_k3(k3_folder):
    """A turn put together from the markers reads as docs/MODELS.md 5.4 writes it."""
    chat = json.loads(planned(k3_folder).files["chat.json"])
    turn = "Hello.".join(chat["user"]) + chat["open"]
    assert turn == (
        '<|open|>message role="user"<|sep|>Hello.<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )
    assert chat["assistant"] == [
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
        "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    ]
    assert chat["system"][0] == '<|open|>message role="system"<|sep|>'


@pytest.mark.parametrize(("config", "marker"), [(k3_config(), "<|sep|>"), (kimi_linear_config(), "<|im_middle|>")])
def test_no_chat_file_without_its_markers(tmp_path, config, marker):
    write_side_files(tmp_path, config)

    def rename(tokenizer):
        for token in tokenizer["added_tokens_decoder"].values():
            token["content"] = token["content"].replace(marker, "<|other|>")

    edit_json(tmp_path / "tokenizer_config.json", rename)
    assert "chat.json" not in planned(tmp_path).files


def test_vision(k3_folder):
    vision = json.loads(planned(k3_folder).files["vision.json"])
    config = k3_config()["vision_config"]
    shape = {key: value for key, value in config.items() if not key.startswith("_")}
    assert "_attn_implementation" in config
    assert vision == shape | {
        "vt_rms_eps": 1.1920929e-7,  # torch.finfo(torch.float32).eps
        "media_placeholder_token_id": k3_config()["media_placeholder_token_id"],
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 14,
        "in_patch_limit": 65536,
        "patch_limit_on_one_side": 512,
        "max_patches": 1024,
    }


def test_no_vision_without_a_tower(linear_folder):
    assert "vision.json" not in planned(linear_folder).files
    assert "vision.json" not in planned(linear_folder, kimi_linear_config() | {"_outer": None}).files


def test_what_is_missing_is_noted(k3_folder):
    (k3_folder / "tiktoken.model").unlink()
    (k3_folder / "tokenizer_config.json").unlink()
    (k3_folder / "preprocessor_config.json").unlink()
    found = planned(k3_folder)
    assert sorted(found.files) == ["vision.json"]
    assert [note.split(" in ")[0].split(" with ")[0] for note in found.notes] == [
        "no tiktoken.model or tokenizer.model",
        "no tokenizer_config.json",
        "no preprocessor_config.json",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'{"a": 1, "a": 2}'),
        ("tokenizer_config.json", b'{"x": ' + b"[" * 100_000),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": "a"}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {"content": 9}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {"content": "\\ud800"}}}'),
        ("tokenizer_config.json", b'{"chat_template": "\\udfff"}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"' + b"9" * 5000 + b'": {"content": "a"}}}'),
        ("preprocessor_config.json", b'{"media_proc_cfg": {"image_mean": [NaN]}}'),
        ("preprocessor_config.json", b"null"),
    ],
)
def test_malformed_side_files_are_named(k3_folder, name, text):
    (k3_folder / name).write_bytes(text)
    with pytest.raises(SourceError, match=name):
        planned(k3_folder)


def test_the_written_files_are_the_planned_ones(family):
    planned_files = plan_sidecars(family.source, detect(family.config)).files
    assert {name: family.files[name] for name in planned_files} == dict(planned_files)
    assert ModelConfig.from_config(detect(family.config).config)
