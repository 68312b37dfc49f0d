"""tokens.html from real records: every token is there, with the state that the objective gave it."""

import json
import re
from html.parser import HTMLParser

import pytest

from qarl_openrlhf.cli import report as cli
from qarl_openrlhf.metrics.records import write_records
from qarl_openrlhf.objectives import REGIONS, build_objective
from qarl_openrlhf.report import ReportError
from qarl_openrlhf.report.tokens_html import MAX_STEPS, load_records, write_tokens_page
from tests.metrics.test_diagnostics import observed


class Spans(HTMLParser):
    """(class, title, text) of every token; fails on tags that are not closed."""

    def __init__(self):
        super().__init__()
        self.tokens, self.open, self.current = [], [], None

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        attributes = dict(attributes)
        if tag == "span" and "title" in attributes:
            self.current = [attributes.get("class", ""), attributes["title"], ""]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "span" and self.current:
            self.tokens.append(tuple(self.current))
            self.current = None

    def handle_data(self, data):
        if self.current:
            self.current[2] += data


def parse(path) -> Spans:
    spans = Spans()
    spans.feed(path.read_text())
    assert spans.open == []
    return spans


@pytest.mark.parametrize("name, hyperparameters", [("grpo_tis", {}), ("mis_gspo", {"is_low": 0.98, "is_high": 1.02}), (None, {})])
def test_every_token_is_shown_with_its_state(tmp_path, name, hyperparameters):
    watch = observed(build_objective(name, **hyperparameters) if name else None, drift=0.5)[2]
    write_records(str(tmp_path), 1, watch.record)
    tokens = parse(write_tokens_page(tmp_path)).tokens
    expected = [(r, i) for r in watch.record["tokens"] for i in range(len(r["ids"]))]
    assert len(tokens) == len(expected)
    for (classes, title, text), (record, i) in zip(tokens, expected):
        assert text == record["tokens"][i].replace("\n", "⏎\n")
        assert f"id {record['ids'][i]}," in title
        if name:
            region = REGIONS[record["region"][i]]
            assert region in title and (region in classes.split()) == (region != "inside")
            assert ("none" in classes.split()) == (record["push"][i] == 0)
            assert f"w = {record['weight'][i]:.4g}" in title
        assert ("unlikely" in classes.split()) == (record["old"][i] < -6.907755)


def test_text_is_escaped(tmp_path):
    record = observed(build_objective("tbpo"))[2].record
    record["tokens"][0]["tokens"][0] = "<script>&\n"
    record["tokens"][0]["prompt"] = "<b>"
    write_records(str(tmp_path), 1, record)
    page = write_tokens_page(tmp_path).read_text()
    assert "&lt;script&gt;&amp;⏎\n" in page and "<script>" not in page and "&lt;b&gt;" in page


def test_steps_are_chosen_evenly_or_as_asked(tmp_path, capsys):
    record = observed(build_objective("tbpo"))[2].record
    for step in range(1, 31):
        write_records(str(tmp_path), step, record)
    page = write_tokens_page(tmp_path).read_text()
    steps = [int(s) for s in re.findall(r"<h2>Step (\d+)", page)]
    assert len(steps) == MAX_STEPS and steps[0] == 1 and steps[-1] == 30
    cli.main(["--tokens", str(tmp_path), "--steps", "3", "7", "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / f"tokens-{'-'.join(tmp_path.parts[-3:])}.html").read_text()
    assert re.findall(r"<h2>Step (\d+)", page) == ["3", "7"]
    with pytest.raises(SystemExit, match="no responses of step 31; it has 1-30"):
        cli.main([str(tmp_path), "--tokens", "--steps", "31"])


def test_a_resumed_run_shows_the_later_responses_and_a_cut_line_is_skipped(tmp_path):
    record = observed(build_objective("tbpo"))[2].record
    write_records(str(tmp_path), 1, record)
    record["tokens"] = [row | {"prompt": "later"} for row in record["tokens"]]
    write_records(str(tmp_path), 1, record)
    with open(tmp_path / "tokens.jsonl", "a") as file:
        file.write(json.dumps(record["tokens"][0])[:50])
    rows = load_records(tmp_path)
    assert list(rows) == [1] and {row["prompt"] for row in rows[1]} == {"later"} and len(rows[1]) == 3


def test_a_directory_without_responses_is_named(tmp_path):
    with pytest.raises(ReportError, match="tokens.jsonl does not exist"):
        write_tokens_page(tmp_path)


@pytest.mark.parametrize("length", [1024, 1025, 3000])
def test_figures_of_a_long_response_are_said_to_be_of_the_tokens_shown(tmp_path, length):
    """The middle of a response over 1024 tokens is not recorded: nothing on the page may pass for the whole response's."""
    record = observed(build_objective("tbpo"))[2].record
    row, kept = record["tokens"][0], min(length, 1024)
    lists = {name: (values * kept)[:kept] for name, values in row.items() if isinstance(values, list)}
    record["tokens"] = [row | lists | {"left_out": length - kept, "region": [1] * kept, "old": [-1.0] * kept, "current": [-0.5] * kept}]
    write_records(str(tmp_path), 1, record)
    page = write_tokens_page(tmp_path).read_text()
    figures = f"{length} tokens · update {row['update']} of the rollout · "
    figures += ("of the 1024 tokens shown: " if length > 1024 else "") + "+5.00e-01 mean Δ · " + f"{kept} {REGIONS[1]}"
    assert figures in page and "the first and last 512 are recorded: its mean Δ and its counts by band are of those alone" in page
