"""A run that the world can reach, over TLS, finishes: its own processes come in by a door of their own."""

import json

import pytest
from supervised_runs import TINY, check_whole

from benchmarks.common.supervised import PACED, Supervised

NUM_STEPS = 2


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_that_listens_everywhere_serves_tls_there_and_its_own_processes_on_loopback(tmp_path):
    trustme = pytest.importorskip("trustme")
    made = trustme.CA().issue_cert("coordinator.example")
    made.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    pem = str(tmp_path / "both.pem")
    tls = (f"--serve.certificate={pem}", f"--serve.key={pem}", "--serve.host=0.0.0.0")
    run = Supervised(tmp_path, *TINY, *PACED, *tls, f"--run.steps={NUM_STEPS}", "--rollout.workers=1")
    assert run.finish() == ""
    check_whole(run.run, NUM_STEPS)
    told = json.loads((run.run / "serve.json").read_text())
    assert told["url"].startswith("https://0.0.0.0:")
    assert told["near_url"].startswith("http://127.0.0.1:")
