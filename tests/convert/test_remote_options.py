"""`hf://` on the command line: what names a repository and a size, and which usage is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import UsageError
from convert.__main__ import main
from convert.options import ConvertOptions, Reclaim, Remote, parse_remote, parse_size


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ("hf://org/name", Remote("org/name", None)),
        ("hf://org/name/", Remote("org/name", None)),
        ("hf://moonshotai/Kimi-K3.1_b", Remote("moonshotai/Kimi-K3.1_b", None)),
        ("hf://org/name@main", Remote("org/name", "main")),
        ("hf://org/name@refs/pr/1", Remote("org/name", "refs/pr/1")),
        ("hf://org/name@v1@2", Remote("org/name", "v1@2")),
        (f"hf://org/name@{'0a' * 20}", Remote("org/name", "0a" * 20)),
        ("org/name", None),
        ("/models/hf", None),
        ("./hf:/org/name", None),
        ("HF://org/name", None),
        ("", None),
    ],
)
def test_repositories(text, remote):
    assert parse_remote(text) == remote


@pytest.mark.parametrize(
    "text",
    [
        *("hf://", "hf:///", "hf://name", "hf://org/", "hf:///name", "hf://org/name/file", "hf://org/na me"),
        *("hf://org/name@", "hf://@main", "hf://org@main", "hf://org/name?revision=main", "hf://org/name\n"),
        *("hf://org\\name", "hf://org/\0", "hf://huggingface.co/org/name", "hf://" + "a/" * 5000),
    ],
)
def test_no_repositories(text):
    with pytest.raises(UsageError, match=r"given as hf://ORG/NAME or hf://ORG/NAME@REVISION$") as caught:
        parse_remote(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("60GB", 60 * 10**9),
        ("60gb", 60 * 10**9),
        ("60G", 60 * 10**9),
        ("60 GB", 60 * 10**9),
        (" 60GB ", 60 * 10**9),
        ("55GiB", 55 << 30),
        ("55gib", 55 << 30),
        ("500MB", 500 * 10**6),
        ("1.5TB", 1_500 * 10**9),
        ("0.5KiB", 512),
        ("1000", 1000),
        ("1000B", 1000),
        ("0", 0),
    ],
)
def test_sizes(text, n_bytes):
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GB", "sixty", "-1GB", "+1GB", "1e9", "60 G B", "60GBB", "60iB", "60PB", "1,5GB", "1.GB", ".5GB", "60%"),
        *("٣GB", "60\u212ai", "nan", "inf", "0x10", "9" * 400, "1." + "9" * 400, "9" * 400 + "TB", "60GB\0"),
    ],
)
def test_no_sizes(text):
    """Also numbers that no float holds."""
    with pytest.raises(UsageError, match=r"^--staging-size must be a size like 60GB, found ") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 300


@given(st.integers(0, 10**6), st.sampled_from(["", "K", "M", "G", "T"]), st.booleans(), st.booleans())
def test_every_unit(number, prefix, binary, lower):
    binary = binary and prefix != ""
    text = f"{number}{prefix}{'i' if binary else ''}B"
    power = ["", "K", "M", "G", "T"].index(prefix)
    assert parse_size(text.lower() if lower else text) == number * (1024 if binary else 1000) ** power


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_refused(text):
    with contextlib.suppress(UsageError):
        assert parse_size(text) >= 0


@given(st.text(max_size=30).map("hf://{}".format))
def test_any_address_is_a_repository_or_refused(text):
    with contextlib.suppress(UsageError):
        remote = parse_remote(text)
        assert remote is not None
        assert remote.repository.count("/") == 1


def test_reclaim_is_not_for_repositories():
    with pytest.raises(UsageError, match="a staging folder is always given back"):
        ConvertOptions(
            source=Path("/staging"), output=Path("/out"), remote=Remote("org/name", None), reclaim=Reclaim.ON
        )


@pytest.mark.parametrize(
    ("staging", "output"), [("s", "s"), ("s", "s/out"), ("s/staging", "s"), ("s", "link/out")], ids=str
)
def test_staging_and_out_inside_each_other(tmp_path, staging, output):
    (tmp_path / "s").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with pytest.raises(UsageError, match=r"^--staging .* and OUT .* must not lie inside each other$"):
        ConvertOptions(source=tmp_path / staging, output=tmp_path / output, remote=Remote("org/name", None))


USAGE = {
    "no staging folder": (["hf://org/name", "OUT"], "--staging DIR goes with SRC hf://ORG/NAME, and only with it"),
    "a staging folder for a local checkpoint": (["SRC", "OUT", "--staging", "DIR"], "--staging DIR goes with SRC hf"),
    "no repository": (["hf://name", "OUT", "--staging", "DIR"], "a repository is given as hf://ORG/NAME"),
    "an empty revision": (["hf://org/name@", "OUT", "--staging", "DIR"], "a repository is given as hf://ORG/NAME"),
    "reclaim": (["hf://org/name", "OUT", "--staging", "DIR", "--reclaim", "on"], "--reclaim is for local checkpoints"),
    "a size": (["hf://org/name", "OUT", "--staging", "DIR", "--staging-size", "much"], "found 'much'"),
    "one folder for both": (["hf://org/name", "OUT", "--staging", "OUT"], "must not lie inside each other"),
    "one in the other": (["hf://org/name", "OUT", "--staging", "OUT/staging"], "must not lie inside each other"),
}


@pytest.mark.parametrize("what", USAGE)
def test_wrong_usage_ends_with_2(tmp_path, monkeypatch, capsys, what):
    """Before the hub is asked or anything written."""
    monkeypatch.chdir(tmp_path)
    arguments, words = USAGE[what]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert list(tmp_path.iterdir()) == []
