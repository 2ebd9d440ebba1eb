import json
import shutil

import pytest

from offbeat.config import load
from offbeat.launch.serve import ADDRESS, _address


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    told = {"url": "http://127.0.0.1:8700", "near_url": "http://127.0.0.1:8701", "run": str(folder)}
    (folder / ADDRESS).write_text(json.dumps(told))
    return folder


def port_of(folder, *overrides):
    return _address(load(None, list(overrides)), folder).port


def test_a_run_that_goes_on_or_was_moved_listens_where_its_workers_look_for_it(run):
    assert port_of(run) == 8700
    assert port_of(run.rename(run.with_name("b"))) == 8700
    assert port_of(run.with_name("b"), "--serve.port=9000") == 9000


def test_a_copy_leaves_its_address_to_the_run_that_it_was_copied_from(run):
    assert port_of(shutil.copytree(run, run.with_name("b"))) == 0


@pytest.mark.parametrize("content", ["", "[]", "3", '{"url": 7}', '{"run": []}', '{"url": "http://x:y"}'])
def test_an_address_that_cannot_be_read_is_any(run, content):
    (run / ADDRESS).write_text(content)
    assert port_of(run) == 0
