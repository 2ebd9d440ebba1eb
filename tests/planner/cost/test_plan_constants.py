import pytest

from offbeat.errors import UserError
from offbeat.planner.cost.constants import Constants, FigureSource, HeldOut, load, save


def test_an_accelerator_takes_its_own_constants_and_the_common_ones_for_the_rest():
    constants = Constants().with_figures("h20", FigureSource.FITTED, gemm_share=0.5)
    assert constants.of("h20").gemm_share == 0.5
    assert constants.of("h20").prefill_share == constants.common.prefill_share
    assert constants.of("h800") == constants.common
    assert constants.source("h20", "gemm_share") == "fitted"
    assert constants.source("h20", "prefill_share") == "default"


def test_a_saved_file_reads_back_the_same(tmp_path):
    fitted = Constants(errors={"h20.decode": HeldOut(0.04, 0.08, 0.1, 12)})
    fitted = fitted.with_figures("h20", FigureSource.FITTED, kv_read_share=0.6, step_overhead_s=0.002)
    save(fitted, tmp_path / "constants.json")
    again = load(tmp_path / "constants.json")
    assert again.of("h20") == fitted.of("h20")
    assert again.common == fitted.common
    assert again.errors == fitted.errors
    for name in ("kv_read_share", "gemm_share"):
        assert again.source("h20", name) == fitted.source("h20", name)


def test_a_file_by_hand_may_name_a_few(tmp_path):
    path = tmp_path / "constants.toml"
    path.write_text("[common]\ngemm_share = 0.7\n[of_accelerator.h20]\ntraining_share = 0.3\n")
    constants = load(path)
    assert constants.of("h20").gemm_share == 0.7
    assert constants.source("h20", "gemm_share") == "catalogue"
    assert constants.source("h20", "training_share") == "catalogue"
    assert constants.source("h20", "link_share") == "default"


@pytest.mark.parametrize(
    "text, told",
    [
        ("[common]\ngem_share = 0.7\n", "common.gem_share: unknown constant; did you mean 'gemm_share'?"),
        ("[common]\ngemm_share = 1.5\n", "common.gemm_share is 1.5; it must be a share above 0, up to 1"),
        (
            "[of_accelerator.h20]\nswap_s = -1\n",
            "of_accelerator.h20.swap_s is -1; it must be a number of",
        ),
        ("common = 3\n", "common is 3; it must be a table of constants"),
        ("[common\n", "not valid TOML"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, text, told):
    path = tmp_path / "constants.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        load(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json"):
        load(tmp_path / "nowhere.json")
