"""The file of `attnroute tune`: where it lies, when it holds, and what decisions get of it. Without torch."""

from __future__ import annotations

import json

import pytest

from attnroute.api import tuned
from attnroute.api.tuned import Times, TunedCall, TuningFile, identity_of, informed, path_for
from attnroute.cli import main
from attnroute.engine.decide import decide
from attnroute.engine.measured import key_of
from attnroute.errors import TableError
from attnroute.memory import reset
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy

HOST = Host(
    arch="sm_90", device_name="NVIDIA H200", versions={"torch": "2.13.0", "cuda": "13.0", "cudnn": "9.20.0"}
)
CALL = parse("bf16 b2 hq8 sq2000 d128 causal")


def times(device_us, host_us=0.01):
    """Return times that are shorter than what is predicted of any backend."""
    return Times(device_ms=device_us / 1000, host_ms=host_us / 1000)


def put(path, call=CALL, **changes):
    entry = {
        "line": "x",
        "day": "2026-11-29",
        "before": "cudnn",
        "after": "flash",
        "margin": 0.03,
        "times": {"cudnn": times(2.0), "flash": times(1.0)},
    }
    file = TuningFile(host=HOST, calls={key_of(call): TunedCall(**entry | changes)})
    file.write(path)
    reset()
    return file


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The user's data lie in a folder of the test."""
    import platformdirs

    monkeypatch.setattr(platformdirs, "user_data_dir", lambda name, **_: str(tmp_path / name))
    reset()
    yield tmp_path
    reset()


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "deep" / "t.json"
    file = put(path)
    assert TuningFile.read(path) == file
    assert [other.name for other in path.parent.iterdir()] == ["t.json"]


def test_it_lies_among_the_users_data_by_card_and_versions(own):
    path = path_for(identity_of(HOST))
    assert path.parent == own / "attnroute" / "tuning" / "sm_90-NVIDIA-H200"
    other = HOST.with_versions({"cudnn": "9.21.0"})
    assert path_for(identity_of(other)).parent == path.parent
    assert path_for(identity_of(other)) != path
    assert path_for(identity_of(HOST.model_copy(update={"broken": {"triton": "x"}}))) == path


def test_without_a_file_nothing_changes():
    policy = Policy()
    assert informed(CALL, HOST, policy) is policy


def test_decisions_go_by_what_was_measured_of_calls_like_this_one(own):
    assert decide(CALL, HOST).selected != "flash"
    put(path_for(identity_of(HOST)))
    near = CALL.with_(seqlen_q=2010, seqlen_kv=2010)
    policy = informed(near, HOST, Policy())
    decision = decide(near, HOST, policy=policy)
    assert decision.selected == "flash"
    assert decision.verdict("flash").predicted_ms == 0.001
    assert decision.verdict("cudnn").predicted_ms == 0.002
    far = CALL.with_(seqlen_q=4000, seqlen_kv=4000)
    assert informed(far, HOST, Policy()).measured is None


def test_graphs_are_measured_as_calls_outside_of_them():
    compiled = CALL.with_(context=CALL.context.changed(compiled=True, cuda_graph=True))
    assert key_of(compiled) == key_of(CALL)
    put(path_for(identity_of(HOST)), times={"cudnn": times(2.0, 0.1), "flash": times(1.0, 5.0)})
    for call, selected in ((CALL, "cudnn"), (compiled, "flash")):
        assert decide(call, HOST, policy=informed(call, HOST, Policy())).selected == selected


@pytest.mark.parametrize(("flash", "selected"), [(1.99, "cudnn"), (1.95, "cudnn"), (1.93, "flash")])
def test_the_one_that_was_before_stays_within_the_margin(flash, selected):
    put(path_for(identity_of(HOST)), times={"cudnn": times(40.0), "flash": times(20 * flash)})
    assert decide(CALL, HOST, policy=informed(CALL, HOST, Policy())).selected == selected


def test_an_explanation_says_what_was_measured_here(own):
    put(path_for(identity_of(HOST)))
    text = str(decide(CALL, HOST, policy=informed(CALL, HOST, Policy())))
    said = " ".join(text.split())
    assert "cudnn and flash measured on 2026-11-29; cudnn stays unless another one is faster by 3 %" in said
    assert "measured 0.001 ms here by attnroute tune" in said
    assert "measured 0.002 ms here by attnroute tune" in said


def test_what_gave_a_wrong_result_is_kept_out():
    put(
        path_for(identity_of(HOST)),
        before="cudnn",
        wrong={"cudnn": "its error is 0.3"},
        times={"flash": times(9.0)},
    )
    decision = decide(CALL, HOST, policy=informed(CALL, HOST, Policy()))
    assert decision.selected != "cudnn"
    assert "cudnn" not in decision.order
    assert "kept out because attnroute tune found here that its error is 0.3" in " ".join(
        str(decision).split()
    )
    required = informed(CALL, HOST, Policy(require="cudnn"))
    assert decide(CALL, HOST, policy=required).selected is None


def test_with_other_versions_it_is_not_used_and_explanations_say_so():
    put(path_for(identity_of(HOST)))
    other = HOST.with_versions({"cudnn": "9.21.0"})
    policy = informed(CALL, other, Policy())
    decision = decide(CALL, other, policy=policy)
    assert decision.selected == decide(CALL, other).selected != "flash"
    assert all(v.prediction is None or v.prediction.kind != "tuned" for v in decision.verdicts)
    said = " ".join(str(decision).split())
    assert said.count("is not used, as it was measured with cudnn 9.20.0 and not 9.21.0") == 1
    assert "`attnroute tune` measures again" in said


def test_another_card_has_nothing_to_do_with_it():
    put(path_for(identity_of(HOST)))
    other = HOST.model_copy(update={"device_name": "NVIDIA H100"})
    assert informed(CALL, other, Policy()).measured is None


def test_off_reads_nothing_and_a_file_may_be_named(tmp_path):
    put(path_for(identity_of(HOST)))
    assert informed(CALL, HOST, Policy(tuning=False)).measured is None
    named = tmp_path / "named.json"
    put(named, times={"cudnn": times(1.0), "flash": times(3.0)})
    assert informed(CALL, HOST, Policy(tuning=named)).measured.file == named


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 2}', '{"host": {"arch": "sm_90"}, "calls": {"a": {"times": 3}}}']
)
def test_a_corrupt_file_is_an_error_that_names_it_and_says_what_to_do(content):
    path = path_for(identity_of(HOST))
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TableError) as raised:
        informed(CALL, HOST, Policy())
    assert str(path) in str(raised.value)
    assert "delete it and run `attnroute tune` again, or set ATTNROUTE_TUNING=off." in str(raised.value)


@pytest.mark.parametrize("wrong", [{"device_ms": -1.0}, {"device_ms": "nan"}, {"device_ms": 0}])
def test_times_that_cannot_be_are_refused(wrong):
    path = path_for(identity_of(HOST))
    data = json.loads(put(path).model_dump_json())
    (entry,) = data["calls"].values()
    entry["times"]["flash"] |= wrong
    path.write_text(json.dumps(data), encoding="utf-8")
    reset()
    with pytest.raises(TableError, match="device_ms"):
        informed(CALL, HOST, Policy())


def test_a_file_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(TableError, match="name another one with --out"):
        TuningFile(host=HOST).write(tmp_path / "file" / "t.json")


def test_the_command_line_explains_with_it(tmp_path, capsys, environment):
    path, host = tmp_path / "t.json", tmp_path / "host.json"
    put(path)
    host.write_text(HOST.model_dump_json(), encoding="utf-8")
    environment(TUNING=str(path))
    assert main(["explain", "bf16 b2 hq8 sq2000 d128 causal", "--host", str(host)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "selected flash" in out
    assert f"tuning {path} (ATTNROUTE_TUNING=" in out


def test_what_was_measured_is_part_of_the_json_of_a_decision():
    put(path_for(identity_of(HOST)))
    decision = decide(CALL, HOST, policy=informed(CALL, HOST, Policy()))
    assert type(decision).model_validate_json(decision.model_dump_json()) == decision


def test_it_is_read_once_until_reset(monkeypatch):
    put(path_for(identity_of(HOST)))
    informed(CALL, HOST, Policy())
    monkeypatch.setattr(tuned.TuningFile, "read", None)
    assert informed(CALL, HOST, Policy()).measured is not None
