"""Readers against hand-made files, and a folder that stands in for the Hub."""

from __future__ import annotations

import importlib.util
import json
import sys

import pydantic
import pytest

from training import readers
from training.data import Record

CONFIG = pydantic.TypeAdapter(readers.DataConfig)
NO_DATASETS = importlib.util.find_spec("datasets") is None


def read(folder, **config):
    return readers.read(CONFIG.validate_python(config), folder)


def write(folder, **files):
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8", newline="")


def test_parallel_files_end_lines_at_newlines_only(tmp_path):
    write(tmp_path, a_en="one\u2028two\r\nthree\x0bfour\n", a_de="\ufeffeins\nvier")
    found = read(tmp_path, format="parallel", source="a.en", target="a.de", prefix="en-de: ")
    assert found.records == [
        Record("en-de: one\u2028two", "eins"),
        Record("en-de: three\x0bfour", "vier"),
    ]
    assert found.skipped == 0


def test_parallel_files_of_other_lengths_are_one_error(tmp_path):
    write(tmp_path, a_en="1\n2\n3\n", a_de="1\n2\n")
    message = r"a\.de: expected 3 lines, as many as \S*a\.en has, got 2: line 3 has no partner$"
    for source, target in (("a.en", "a.de"), ("a.de", "a.en")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, format="parallel", source=source, target=target, max_records=1)


@pytest.mark.parametrize(
    ("files", "config", "place"),
    [
        ({"a_en": "1\n2\n3\n", "a_de": "1\n \n\n"}, {"source": "a.en", "target": "a.de"}, r"a\.de:2"),
        ({"a_en": "1\n\n3\n", "a_de": "1\n\n\n"}, {"source": "a.en", "target": "a.de"}, r"a\.en:2"),
        ({"a_tsv": "1\t1\n2\t\n\t3\n"}, {"format": "tsv", "file": "a.tsv"}, r"a\.tsv:2"),
        (
            {"a_jsonl": '{"s": "1", "t": "1"}\n\n{"s": "2", "t": ""}\n{"s": "", "t": "3"}\n'},
            {"format": "jsonl", "file": "a.jsonl", "source": "s", "target": "t"},
            r"a\.jsonl:3",
        ),
    ],
)
def test_an_empty_side_is_an_error_or_counted(files, config, place, tmp_path):
    write(tmp_path, **files)
    config = {"format": "parallel"} | config
    message = place + r": expected text, got an empty \w+ \(pair 2, and 1 more pairs like it"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **config)
    assert read(tmp_path, **config, skip_empty=True) == ([Record("1", "1")], 2)
    assert read(tmp_path, **config, max_records=1) == ([Record("1", "1")], 0)
    with pytest.raises(ValueError, match=place + r": .* \(pair 2, and 0 more pairs like it"):
        read(tmp_path, **config, max_records=2)  # it looks no further than it was to read


def test_an_empty_side_is_told_before_a_broken_line_behind_it(tmp_path):
    write(tmp_path, a_tsv="1\t1\n\t2\n3\t\n4\n5\t\n")
    with pytest.raises(ValueError, match=r"a\.tsv:2: expected text, .* \(pair 2, and 1 more pairs like it"):
        read(tmp_path, format="tsv", file="a.tsv")


def test_nothing_but_empty_sides_is_an_error(tmp_path):
    write(tmp_path, a_tsv="\t1\n2\t\n")
    with pytest.raises(ValueError, match=r"tsv data: expected at least one pair, got none \(2 empty\)"):
        read(tmp_path, format="tsv", file="a.tsv", skip_empty=True)


def test_columns_by_number_and_by_name(tmp_path):
    write(tmp_path, a_tsv='id\tde\ten\n7\t"Haus"\thouse\n')
    by_name = read(tmp_path, format="tsv", file="a.tsv", source="en", target="de")
    assert by_name.records == [Record("house", '"Haus"')]
    by_number = read(tmp_path, format="tsv", file="a.tsv", source=2, target=1)
    assert by_number.records == [Record("en", "de"), Record("house", '"Haus"')]


def test_several_data_sets_follow_one_another(tmp_path):
    write(
        tmp_path, a_tsv="one\teins\ntwo\tzwei\n", b_jsonl='{"q": "three", "a": ""}\n{"q": "4", "a": "vier"}\n'
    )
    first = {"format": "tsv", "file": "a.tsv", "prefix": "en: ", "max_records": 1}
    second = {"format": "jsonl", "file": "b.jsonl", "source": "q", "target": "a", "skip_empty": True}
    found = read(tmp_path, format="several", parts=[first, second])
    assert found.records == [Record("en: one", "eins"), Record("4", "vier")]
    assert found.skipped == 1


def test_keys_may_be_paths_and_lists_are_joined(tmp_path):
    rows = [
        {"translation": {"en": "house", "de": "Haus"}, "a.b": "dotted"},
        {"translation": {"en": ["Two", "sentences."], "de": "Zwei"}, "a.b": "key"},
    ]
    write(tmp_path, a_jsonl="".join(json.dumps(row) + "\n" for row in rows))
    options = {"format": "jsonl", "file": "a.jsonl"}
    found = read(tmp_path, **options, source="translation.en", target="translation.de").records
    assert found == [Record("house", "Haus"), Record("Two sentences.", "Zwei")]
    (second,) = read(tmp_path, **options, source="a.b", target="translation.de", max_records=1).records
    assert second == Record("dotted", "Haus")
    write(tmp_path, a_jsonl='{"t": ["first", "second"], "s": "x"}')
    assert read(tmp_path, **options, source="s", target="t.1").records == [Record("x", "second")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2: expected a JSON object, got "),
        ("[1]", r"a\.jsonl:2: expected 's', got no 's' among: \[1\]"),
        ('{"t": "1", "x": 2}', r"a\.jsonl:2: expected 's', got no 's' among: t, x"),
        ('{"s": 1, "t": "1"}', r"a\.jsonl:2: s: expected text, got int"),
        ('{"s": {"en": 1}, "t": "1"}', r"a\.jsonl:2: s: expected text, got dict"),
        ('{"s": ["a", 1], "t": "1"}', r"a\.jsonl:2: s: expected text, got list"),
        ('{"s": "\\ud800", "t": "1"}', r"a\.jsonl:2: s: expected text, got half a surrogate pair"),
    ],
)
def test_lines_that_are_no_pairs_are_refused_by_number(line, message, tmp_path):
    write(tmp_path, a_jsonl='{"s": "1", "t": "1"}\n' + line)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, format="jsonl", file="a.jsonl", source="s", target="t")


def test_broken_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data: no such file: .*a\.en"):
        read(tmp_path, format="parallel", source="a.en", target="a.de")
    (tmp_path / "a.tsv").write_bytes(b"1\t1\n\xff\t2\n")
    with pytest.raises(ValueError, match=r"a\.tsv:2: expected UTF-8, got b'\\xff'"):
        read(tmp_path, format="tsv", file="a.tsv")
    write(tmp_path, a_tsv="1\t1\n2\n")
    with pytest.raises(ValueError, match=r"a\.tsv:2: expected at least 2 columns, got 1"):
        read(tmp_path, format="tsv", file="a.tsv")
    with pytest.raises(ValueError, match=r"a\.tsv:1: expected a column named 'en', got 1, 1"):
        read(tmp_path, format="tsv", file="a.tsv", source="en", target="1")


@pytest.mark.parametrize(
    "config",
    [
        {"format": "csv", "file": "a"},
        {"format": "tsv", "file": "a", "delimiter": ","},
        {"format": "tsv", "file": "a", "source": 0, "target": "de"},
        {"format": "tsv", "file": "a", "source": -1},
        {"format": "jsonl", "file": "a", "source": "s"},
        {"format": "hub", "id": "a", "source": "s", "target": "t"},
        {"format": "parallel", "source": "a", "target": "b", "max_records": 0},
    ],
)
def test_wrong_configurations_are_refused(config):
    with pytest.raises(pydantic.ValidationError):
        CONFIG.validate_python(config)


# --- Hub data sets ----------------------------------------------------------------------------------

WMT = {"format": "hub", "id": "wmt", "config": "de-en", "split": "train"}
WMT |= {"source": "translation.en", "target": "translation.de"}
HOUSES = [Record("house", "Haus"), Record("two houses", "zwei Häuser")]


@pytest.fixture
def mirror(tmp_path):
    """A data set as it lies on the Hub: a card that names configurations, and data files."""
    folder = tmp_path / "wmt"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: de-en\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )
    rows = [{"translation": {"en": record.source, "de": record.target}} for record in HOUSES]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No network, and a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


@pytest.mark.skipif(NO_DATASETS, reason="the package datasets is not installed")
def test_a_folder_stands_in_for_the_hub(mirror, offline):
    assert read(mirror.parent, **WMT) == (HOUSES, 0)
    assert read(mirror.parent, **WMT, max_records=1, prefix="> ").records == [Record("> house", "Haus")]


@pytest.mark.skipif(NO_DATASETS, reason="the package datasets is not installed")
def test_a_cached_data_set_needs_no_network(mirror, offline, tmp_path):
    offline.load_dataset(str(mirror), "de-en")  # fills the cache as a download would
    mirror.rename(tmp_path / "gone")
    assert read(tmp_path / "elsewhere", **WMT).records == HOUSES


@pytest.mark.skipif(NO_DATASETS, reason="the package datasets is not installed")
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"id": "nothing/here"}, FileNotFoundError, "data set nothing/here: .*nothing/here"),
        ({"config": "fr-en"}, ValueError, "data set wmt: .*fr-en.*de-en"),
        ({"split": "test"}, ValueError, 'data set wmt: .*"test"'),
        ({"source": "translation.fr"}, ValueError, "data set wmt, train row 0: expected 'translation.fr'"),
    ],
)
def test_what_the_hub_does_not_have_is_one_error(changes, kind, message, mirror, offline):
    with pytest.raises(kind, match=message):
        read(mirror.parent, **(WMT | changes))


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'jspec\[data\]'"):
        read(tmp_path, **WMT)
