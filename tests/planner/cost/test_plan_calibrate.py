import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import UserError
from offbeat.planner.cost.calibrate import Measured, MeasuredMachine, Measurement, fit, fit_file, read, write
from offbeat.planner.cost.constants import Efficiencies, FigureSource
from offbeat.planner.cost.rollout_time import allreduce_s, decode_step_s, prefill_flop, prefill_s
from offbeat.planner.inputs.hardware import Accelerator
from offbeat.planner.inputs.model_shapes import known_model
from offbeat.planner.inputs.workload import ModelShape

CARD = Accelerator("card", 100e12, 80e9, 2e12, 2e11, 5e10)
MODEL = ModelShape("7b", 28, 3584, 28, 4, 128, 18_944, 152_064)
TRUE = Efficiencies(
    gemm_share=0.6,
    weight_read_share=0.75,
    kv_read_share=0.65,
    prefill_share=0.5,
    link_share=0.8,
    allreduce_latency_s=1e-5,
    step_overhead_s=3e-3,
    training_share=0.35,
)
ROWS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (512, 2048, 8192)


def decodes(noise=0.0, figures=TRUE):
    random = np.random.default_rng(0)
    return [
        Measurement(
            "decode",
            "card",
            decode_step_s(MODEL, CARD, figures, 1, rows, context) * (1 + noise * random.normal()),
            rows=rows,
            context=context,
        )
        for rows in ROWS
        for context in CONTEXTS
    ]


def trainings(largest_is_slower_by=1.0):
    flop = 4 * (2 * 7.07e9 * 1e6 + 2 * 28 * 28 * 128 * 4e9)
    return [
        Measurement(
            "train",
            "card",
            flop / (cards * 100e12 * 0.35) * (largest_is_slower_by if cards == 16 else 1),
            tokens=1e6,
            sum_square_tokens=4e9,
            num_accelerators=cards,
            num_forwards=1,
        )
        for cards in (4, 8, 16)
    ]


def test_a_decode_sweep_gives_back_the_constants_that_made_it():
    figures = fit(decodes(), MODEL, {"card": CARD}).of("card")
    assert figures.kv_read_share == pytest.approx(TRUE.kv_read_share, rel=0.03)
    assert figures.weight_read_share == pytest.approx(TRUE.weight_read_share, rel=0.1)
    assert figures.gemm_share == pytest.approx(TRUE.gemm_share, rel=0.1)
    for rows, context in ((3, 1000), (100, 4000), (400, 16_000)):
        fitted, true = (decode_step_s(MODEL, CARD, one, 1, rows, context) for one in (figures, TRUE))
        assert fitted == pytest.approx(true, rel=0.05)


def test_a_sweep_at_one_context_gives_overheads_and_leaves_the_reading_of_keys_and_values_at_its_default():
    one_context = [one for one in decodes() if one.context == 2048]
    constants = fit(one_context, MODEL, {"card": CARD})
    figures = constants.of("card")
    assert constants.source("card", "kv_read_share") == FigureSource.DEFAULT
    assert constants.source("card", "row_overhead_s") == FigureSource.FITTED
    assert constants.errors["card.decode"].mean < 0.05
    for rows in (3, 100, 200):
        fitted, true = (decode_step_s(MODEL, CARD, each, 1, rows, 2048) for each in (figures, TRUE))
        assert fitted == pytest.approx(true, rel=0.05)


def test_noise_shows_in_the_held_out_error_and_moves_the_constants_little():
    clean, noisy = (fit(decodes(noise), MODEL, {"card": CARD}) for noise in (0.0, 0.03))
    assert clean.errors["card.decode"].mean < 0.02
    error = noisy.errors["card.decode"]
    assert 0.015 < error.mean < 0.1
    assert error.mean <= error.p95 <= error.worst
    assert error.num_points == 2 * len(ROWS) * len(CONTEXTS)
    assert noisy.of("card").kv_read_share == pytest.approx(TRUE.kv_read_share, rel=0.1)


def test_the_held_out_error_sees_what_the_model_cannot_describe():
    bent = [replace(one, seconds=one.seconds * (2 if one.rows == 64 else 1)) for one in decodes()]
    straight = fit(decodes(), MODEL, {"card": CARD}).errors["card.decode"].worst
    assert fit(bent, MODEL, {"card": CARD}).errors["card.decode"].worst > straight + 0.3


def test_weights_are_never_read_faster_than_the_card_can():
    slow_steps = fit(decodes(0.05, replace(TRUE, weight_read_share=1.0, step_overhead_s=0.05)), MODEL, {"card": CARD})
    assert slow_steps.of("card").weight_read_share <= 1
    assert slow_steps.errors["card.decode"].mean < 0.1


def test_prefill_and_link_are_lines_with_an_intercept():
    prefills = [
        Measurement(
            "prefill",
            "card",
            0.004 + prefill_s(prefill_flop(MODEL, tokens, tokens**2), MODEL, CARD, TRUE, 1),
            tokens=tokens,
            sum_square_tokens=tokens**2,
        )
        for tokens in (256, 1024, 4096, 16_384)
    ]
    links = [
        Measurement("link", "card", allreduce_s(size, CARD, TRUE, 4), num_bytes=size, num_accelerators=4)
        for size in (1e4, 1e6, 1e8)
    ]
    constants = fit([*prefills, *links], MODEL, {"card": CARD})
    assert constants.of("card").prefill_share == pytest.approx(0.5)
    assert constants.of("card").link_share == pytest.approx(0.8)
    assert constants.of("card").allreduce_latency_s == pytest.approx(1e-5)
    assert constants.errors["card.link"].worst < 1e-6
    assert constants.source("card", "link_share") == "fitted"
    assert constants.source("card", "gemm_share") == "default"


def test_training_holds_out_the_largest_gang():
    constants = fit(trainings(), MODEL, {"card": CARD})
    assert constants.of("card").training_share == pytest.approx(0.35, rel=0.01)
    slower = fit(trainings(1.25), MODEL, {"card": CARD}).errors["card.train"]
    assert slower.num_points == 1
    assert slower.mean == pytest.approx(0.2)


@pytest.mark.parametrize(
    "measurements, told",
    [
        (decodes(figures=replace(TRUE, kv_read_share=0.3)), "no answers were preempted"),
        ([one for one in decodes() if one.rows == 4], "3 or more different values of rows, not 1"),
        (trainings()[:1], "measure two or more sizes or numbers of tokens"),
        ([replace(one, seconds=one.seconds / 5) for one in trainings()], "times the peak"),
        ([replace(one, accelerator="cart") for one in trainings()], "did you mean 'card'?"),
    ],
)
def test_a_fit_that_cannot_be_trusted_is_refused(measurements, told):
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        fit(measurements, MODEL, {"card": CARD})
    assert told in str(caught.value)


def test_a_file_of_measurements_reads_back(tmp_path):
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in trainings()) + "\n")
    assert read(path).measurements == trainings()


def test_what_was_measured_on_which_machine_is_written_and_read_back(tmp_path):
    path, machine = (
        tmp_path / "measured.jsonl",
        MeasuredMachine("desk", 1.5, 64, 0.05, date="2026-01-02", versions={"a": "1"}),
    )
    write(path, machine, decodes())
    assert read(path) == Measured({"desk": machine}, decodes())
    assert '"rows": 1' in path.read_text()
    assert "num_bytes" not in path.read_text()


def test_one_gang_alone_holds_out_the_most_tokens():
    sizes = [replace(trainings()[0], tokens=n * 1e5, sum_square_tokens=n * 4e8, seconds=n * 42.7) for n in (1, 2, 4)]
    slower = [*sizes[:2], replace(sizes[2], seconds=sizes[2].seconds * 1.25)]
    assert fit(sizes, MODEL, {"card": CARD}).errors["card.train"].worst < 1e-9
    error = fit(slower, MODEL, {"card": CARD}).errors["card.train"]
    assert (error.num_points, error.mean) == (1, pytest.approx(0.2))


MACHINE = MeasuredMachine("own", tflops=100, memory_gb=80, bandwidth_tb_s=2, bytes_per_weight=4, bytes_per_kv=4)


def of(name, measurements):
    return [replace(one, accelerator=name) for one in measurements]


def test_a_files_machine_gives_the_peak_and_the_bytes_of_a_number():
    twice_as_fast = replace(MACHINE, bandwidth_tb_s=4)
    figures = fit_file(Measured({"own": twice_as_fast}, of("own", decodes())), MODEL).of("own")
    assert figures.kv_read_share == pytest.approx(TRUE.kv_read_share, rel=0.03)
    assert figures.weight_read_share == pytest.approx(TRUE.weight_read_share, rel=0.1)


def test_slow_attention_is_believed_where_nothing_can_be_preempted():
    slow = of("own", decodes(figures=replace(TRUE, kv_read_share=0.1)))
    machine = replace(MACHINE, bytes_per_weight=2, bytes_per_kv=2)
    with pytest.raises(UserError, match="no answers were preempted"):
        fit_file(Measured({"own": machine}, slow), MODEL)
    found = fit_file(Measured({"own": replace(machine, engine="embedded")}, slow), MODEL)
    assert found.of("own").kv_read_share == pytest.approx(0.1, rel=0.05)


def test_an_alias_of_the_catalogue_becomes_the_name_that_a_plan_looks_up():
    found = fit_file(Measured({}, of("a100", trainings())), MODEL)
    assert set(found.of_accelerator) == {"a100-80gb"}
    with pytest.raises(UserError, match=r"accelerator 'h2000' is not in the catalogue; did you mean 'h200'\?"):
        fit_file(Measured({}, of("h2000", trainings())), MODEL)


def test_a_link_without_a_peak_is_refused():
    links = [Measurement("link", "own", 1e-3, num_bytes=size, num_accelerators=4) for size in (1e4, 1e6, 1e8)]
    with pytest.raises(UserError, match="link_gb_s"):
        fit_file(Measured({"own": MACHINE}, links), MODEL)


@pytest.mark.parametrize(
    "line, told",
    [
        ('{"kind": "decode"', "not valid JSON"),
        ('{"kind": "decoding", "accelerator": "a", "seconds": 1}', "did you mean 'decode'?"),
        ('{"kind": "decode", "seconds": 1}', "accelerator is missing"),
        ('{"kind": "decode", "accelerator": "a", "seconds": 0}', "seconds is 0; it must be a finite number above 0"),
        ('{"kind": "decode", "accelerator": "a", "seconds": 1, "row": 2}', "did you mean 'rows'?"),
        ('{"kind": "decode", "accelerator": "a", "seconds": 1, "rows": "two"}', "rows is 'two'"),
        ("[1]", "the line is not a JSON object"),
        ('{"accelerator": "a", "seconds": 1}', "kind is missing"),
        ('{"kind": "decode", "accelerator": 5, "seconds": 1}', "accelerator is 5; it must be text"),
        ('{"kind": "decode", "accelerator": "a", "seconds": Infinity}', "seconds is inf"),
        ('{"kind": "decode", "accelerator": "a", "seconds": true}', "seconds is True"),
        ('{"kind": "machine", "accelerator": "a", "memory_gb": 1, "bandwidth_tb_s": 1}', "tflops is missing"),
        ('{"kind": "machine", "accelerator": "a", "tflop": 1}', "did you mean 'tflops'?"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(tmp_path, line, told):
    path = tmp_path / "measured.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(UserError, match=r"measured\.jsonl:2: ") as caught:
        read(path)
    assert told in str(caught.value)


def test_a_file_without_measurements_is_refused(tmp_path):
    path = tmp_path / "measured.jsonl"
    write(path, MACHINE, [])
    with pytest.raises(UserError, match="has no measurements"):
        read(path)


def flat(most_rows):
    return [
        Measurement("decode", "card", 0.017 + 0.0001 * (rows % 3), rows=rows, context=context)
        for rows in ROWS
        for context in CONTEXTS
        if rows <= most_rows
    ]


def test_steps_that_take_as_long_whatever_their_size_tell_the_overhead_alone():
    constants = fit(flat(16), MODEL, {"card": CARD})
    assert 0.003 < constants.of("card").step_overhead_s < 0.01  # weights take 9.4 of 17 ms
    assert constants.source("card", "step_overhead_s") == FigureSource.FITTED
    assert constants.source("card", "kv_read_share") == FigureSource.DEFAULT


def test_steps_that_are_shorter_than_the_card_could_read_are_refused_however_alike():
    with pytest.raises(UserError, match="do not determine kv_read_share"):
        fit(flat(256), MODEL, {"card": CARD})


def test_what_a_gpu_measured_gives_constants_and_their_error():
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / "calibrate-h200" / "measurements.jsonl"
    constants = fit_file(read(kept), known_model("qwen2.5-1.5b"))
    assert constants.of("h200").step_overhead_s == pytest.approx(0.0158, abs=1e-4)
    assert constants.of("h200").training_share == pytest.approx(0.297, abs=1e-3)
    assert constants.errors["h200.decode"].mean == pytest.approx(0.088, abs=1e-3)
