"""What of a repository is needed: a decision on names alone."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.checkpoint import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from container.errors import HubError, UsageError
from download import selection
from download.listing import Listing, RemoteFile


def listing(*names: str, **sizes: int) -> Listing:
    files = [RemoteFile(name=name, n_bytes=sizes.get(name, len(name)), git_sha1="0" * 40) for name in names]
    return Listing(repository="org/name", commit="c" * 40, files={file.name: file for file in files})


def names(files: object) -> list[str]:
    return [file.name for file in files]  # type: ignore[attr-defined]


def index(*shards: object) -> bytes:
    return json.dumps({"weight_map": {f"t{n}": shard for n, shard in enumerate(shards)}}).encode()


K3_LIKE = [
    "LICENSE",
    ".gitattributes",
    "README.md",
    "chat_template.jinja",
    "config.json",
    "configuration_kimi.py",
    "encoding_k3.py",
    "generation_config.json",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "tiktoken.model",
    "tokenization_kimi.py",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "tech_report.pdf",
    "pytorch_model.bin.index.json",
]
NOT_NEEDED = [
    "model-00001-of-00096.safetensors",
    "model.gguf",
    "pytorch_model.bin",
    "MODEL.BIN",
    "tf_model.h5",
    "flax_model.msgpack",
    "a.onnx",
    "a.onnx_data",
    "consolidated.00.pth",
    "model.pt",
    "rust_model.ot",
    "docs/deploy.md",
    "figures/a.png",
    "original/config.json",
    "onnx/model.onnx",
]


def test_small_files_are_everything_in_the_root_but_weights():
    assert sorted(names(selection.small_files(listing(*K3_LIKE, *NOT_NEEDED)))) == sorted(K3_LIKE)


def test_small_files_come_smallest_first():
    found = selection.small_files(listing(CONFIG_NAME, "b.txt", "a.txt", "z", **{CONFIG_NAME: 7, "b.txt": 1, "z": 0}))
    assert names(found) == ["z", "b.txt", "a.txt", CONFIG_NAME]


def test_no_config_is_no_checkpoint():
    with pytest.raises(HubError, match=r"org/name@cccccccccccc has no config\.json: this is not a checkpoint"):
        selection.small_files(listing("README.md", "sub/config.json", SINGLE_NAME))


def test_the_index_counts_where_there_is_one():
    both = selection.index_file(listing(INDEX_NAME, SINGLE_NAME))
    assert both is not None
    assert both.name == INDEX_NAME
    assert selection.index_file(listing(SINGLE_NAME)) is None
    with pytest.raises(HubError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        selection.index_file(listing(CONFIG_NAME, "model.gguf", "sub/model.safetensors"))


def test_shards_come_by_the_value_of_their_numbers():
    shards = [f"model-{n}-of-12.safetensors" for n in range(1, 13)]
    mixed = random.Random(1).sample(shards, len(shards))
    weight_map = selection.parse_index(listing(), index(*mixed, *mixed))
    assert names(selection.shards(listing(*mixed, "model-13-of-12.safetensors"), weight_map)) == shards


def test_a_shard_that_the_repository_lacks():
    weight_map = selection.parse_index(listing(), index("a.safetensors", "b.safetensors", "c.safetensors"))
    with pytest.raises(HubError, match=r"names 'b\.safetensors', which .* \(2 of 3 shards are absent\)"):
        selection.shards(listing("a.safetensors"), weight_map)


@pytest.mark.parametrize(
    "raw",
    [
        index("sub/a.safetensors"),
        index("../a.safetensors"),
        index("/etc/passwd"),
        index(".."),
        index("a\0b"),
        index("a\\b"),
        index(1),
        index(None),
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b"{}",
        b"[]",
        b"",
        b"\xff",
        b'{"weight_map": {"a": "b"}, "weight_map": {"a": "c"}}',
    ],
)
def test_an_index_that_is_none(raw):
    with pytest.raises(HubError, match=r"org/name@cccccccccccc: model\.safetensors\.index\.json"):
        selection.parse_index(listing(), raw)


ALL = listing("config.json", "README.md", "a-10.safetensors", "a-2.safetensors", "sub/b.safetensors", "sub/c.txt")
NEEDED = tuple(ALL.files[name] for name in ("README.md", "config.json", "a-2.safetensors", "a-10.safetensors"))


@pytest.mark.parametrize(
    ("include", "exclude", "chosen", "left_out"),
    [
        ([], [], ["README.md", "config.json", "a-2.safetensors", "a-10.safetensors"], []),
        ([], ["README*"], ["config.json", "a-2.safetensors", "a-10.safetensors"], ["README.md"]),
        ([], ["sub/*", "*.gguf"], ["README.md", "config.json", "a-2.safetensors", "a-10.safetensors"], []),
        (["*.json"], [], ["config.json"], ["README.md", "a-2.safetensors", "a-10.safetensors"]),
        (["sub/"], [], ["sub/c.txt", "sub/b.safetensors"], names(NEEDED)),
        (
            ["*"],
            [],
            ["README.md", "sub/c.txt", "config.json", "a-2.safetensors", "a-10.safetensors", "sub/b.safetensors"],
            [],
        ),
        (["*.safetensors"], ["*/*"], ["a-2.safetensors", "a-10.safetensors"], ["README.md", "config.json"]),
        ([], ["*"], [], names(NEEDED)),
    ],
)
def test_globs(include, exclude, chosen, left_out):
    choice = selection.choose(ALL, NEEDED, include=include, exclude=exclude)
    assert (names(choice.files), list(choice.left_out)) == (chosen, left_out)
    assert choice.n_bytes == sum(len(name) for name in chosen)


def test_a_glob_that_matches_nothing_is_a_mistake():
    with pytest.raises(UsageError, match=r"--include \*\.JSON matches none of org/name's 6 files"):
        selection.choose(ALL, NEEDED, include=["*.json", "*.JSON"])


NAMES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1, max_size=12), unique=True, max_size=8
)


@given(st.lists(st.integers(0, 10**12), unique=True, min_size=1))
def test_natural_order_is_that_of_the_numbers(numbers):
    found = sorted((f"model-{n}-x.safetensors" for n in numbers), key=selection.natural_order)
    assert found == [f"model-{n}-x.safetensors" for n in sorted(numbers)]


@given(NAMES)
def test_any_two_names_can_be_ordered(some):
    ordered = sorted(some, key=selection.natural_order)
    assert sorted(ordered) == sorted(some)


@given(NAMES, st.lists(st.sampled_from(["*", "?", "*.json", "[ab]*", "a/"]), max_size=3))
def test_a_choice_loses_nothing_silently(some, exclude):
    there = listing(*some)
    needed = list(there.files.values())
    choice = selection.choose(there, needed, exclude=exclude)
    assert sorted([*names(choice.files), *choice.left_out]) == sorted(some)
