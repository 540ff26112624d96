"""Reading the verifier's answer: nothing but a proof counts as one. No verifier is needed."""

import json
import sys

import pytest

from proving.failure import describe
from proving.verifier import RACE_FREE, VERIFIED, run, verdict_of

RESULTS = (
    *("not_wellsynced", "potential_race", "invalid_lifecycle", "equivalence_not_proven", "unsupported"),
    *("invalid_input", "missing_input", "timeout", "memory_budget_exceeded", "analysis_budget_exceeded"),
    *("allocation_failed", "tool_failure"),
)


def report(result: str, checks: dict[str, str], **more: object) -> str:
    return json.dumps({"result": result, "checks": checks, "warning_count": 0, "peak_rss_mib": 512.5} | more)


def test_proofs():
    safe = verdict_of(report(*RACE_FREE), seconds=3)
    assert (safe.race_free, safe.verified, safe.seconds, safe.memory_mib) == (True, False, 3, 512.5)
    same = verdict_of(report(*VERIFIED), seconds=3)
    assert (same.race_free, same.verified) == (False, True)


@pytest.mark.parametrize("result", RESULTS)
def test_every_other_result_is_a_failure(result):
    for _, checks in (RACE_FREE, VERIFIED):
        verdict = verdict_of(report(result, checks), seconds=3)
        assert not verdict.race_free
        assert not verdict.verified


@pytest.mark.parametrize("check", ["synchronization", "memory"])
@pytest.mark.parametrize("status", ["failed", "incomplete", "not_run", "not_requested"])
def test_a_proof_with_a_check_that_did_not_pass_is_a_failure(check, status):
    assert not verdict_of(report(RACE_FREE[0], RACE_FREE[1] | {check: status}), seconds=3).race_free
    assert not verdict_of(report(VERIFIED[0], VERIFIED[1] | {check: status}), seconds=3).verified


def test_a_proof_with_warnings_is_a_failure():
    assert not verdict_of(report(*RACE_FREE, warning_count=1), seconds=3).race_free
    assert not verdict_of(report(*VERIFIED, warning_count=None), seconds=3).verified


@pytest.mark.parametrize(
    "stdout", ["", "Killed", "[]", "{}", '{"result": "race_free"}', '{"result": 1, "checks": {}}', "null"]
)
def test_no_report_is_a_tool_failure(stdout):
    verdict = verdict_of(stdout, seconds=3, stderr="out of memory")
    assert (verdict.result, verdict.race_free, verdict.verified) == ("tool_failure", False, False)
    assert verdict.findings[0]["message"] == "out of memory"


def test_a_late_verifier_is_ended():
    stdout, _ = run([sys.executable, "-c", "import time; print('x', flush=True); time.sleep(60)"], ".", 0.5)
    verdict = verdict_of(stdout, seconds=0.5)
    assert (verdict.result, verdict.race_free) == ("timeout", False)


PTX = """	.file	1 "/somewhere/kernels/softmax.py"
	ret;
	.loc	1 45 9                          // softmax.py:45:9
	bar.sync 	0;
"""


def test_findings_are_described_with_their_lines():
    race = {
        "region": {"allocation": "shared", "bytes": 8, "offset": 64},
        "first": {"mode": "write", "actor": 0, "location": {"file": "/somewhere/roles.py", "line": 18}},
        "second": {"mode": "read", "actor": 96, "location": {"file": "kernel.ptx", "line": 4}},
    }
    deadlock = {"code": "blocked", "message": "cannot advance", "details": {"source": {"ptx_line": 4}}}
    text = report("potential_race", {}, races=[race], diagnostics=[deadlock])
    assert describe(PTX, verdict_of(text, seconds=1)) == [
        "blocked: cannot advance",
        "  at line 4 of the PTX, softmax.py:45",
        "race on 8 bytes at 64 of shared",
        "  write by thread 0 at roles.py:18",
        "  read by thread 96 at line 4 of the PTX, softmax.py:45",
    ]
