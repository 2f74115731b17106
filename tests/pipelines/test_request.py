"""The one validation: what it fills in, what it refuses, and that each refusal names the way out."""

import math

import pytest

from telefuser.pipelines.request import MAX_SEED, parse_size, validate_request

DEFAULTS = {
    "height": 480,
    "width": 832,
    "num_frames": 81,
    "steps": 50,
    "guidance": 5.0,
    "shift": 5.0,
    "fps": 16,
    "negative_prompt": "blurry",
    "scheduler": "unipc",
}


def refused(match, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        validate_request(DEFAULTS, *(args or ("a cat",)), **kwargs)


def test_defaults_fill_what_the_request_leaves_open():
    request = validate_request(DEFAULTS, "a cat", steps=4, guidance=1, seed=7)
    assert (request.prompts, request.negative_prompts, request.seeds) == (("a cat",), ("blurry",), (7,))
    assert (request.width, request.height, request.num_frames, request.steps) == (832, 480, 81, 4)
    assert (request.guidance, request.shift, request.scheduler) == (1.0, 5.0, "unipc")
    assert request.latent_shape(16) == (16, 21, 60, 104)


@pytest.mark.parametrize("text", ["832x480", "832*480", " 832 X 480 ", "832×480"])
def test_a_size_is_width_first_with_either_separator(text):
    """B120."""
    assert parse_size(text) == (832, 480)


@pytest.mark.parametrize("text", ["832", "832x", "x480", "832x480x3", "-832x480", "8.5x480", "wide", ""])
def test_text_that_is_no_size_is_refused(text):
    """B120."""
    with pytest.raises(ValueError, match="832x480"):
        parse_size(text)


@pytest.mark.parametrize(
    ("width", "height", "nearest"),
    [(833, 481, "832x480"), (8, 8, "16x16"), (0, 0, "16x16"), (-16, 32, "16x32"), (640, 470, "640x464")],
)
def test_sizes_off_the_grid_name_the_nearest_legal_one(width, height, nearest):
    """B120."""
    refused(f"{width}x{height}.*nearest such size is {nearest}", width=width, height=height)


def test_464x640_is_legal():
    """B120: 464 is a multiple of 16, though not of 32."""
    request = validate_request(DEFAULTS, "a cat", width=464, height=640)
    assert request.latent_shape(16)[2:] == (80, 58)


@pytest.mark.parametrize(("frames", "nearest"), [(80, 81), (0, 1), (-3, 1), (16, 17), (18, 17), (83, 81)])
def test_frame_counts_off_4n_plus_1_name_the_nearest(frames, nearest):
    refused(f"{frames} frames.*4n \\+ 1, the nearest is {nearest}", num_frames=frames)


def test_one_frame_is_legal():
    assert validate_request(DEFAULTS, "a cat", num_frames=1).latent_shape(16)[1] == 1


@pytest.mark.parametrize("steps", [0, -1])
def test_steps_below_one_are_refused(steps):
    """B122."""
    refused("steps must be at least 1", steps=steps)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guidance", -0.5),
        ("guidance", math.nan),
        ("guidance", math.inf),
        ("guidance", "5"),
        ("guidance", 1e30),
        ("shift", 0),
        ("shift", -1.0),
        ("shift", math.inf),
        ("steps", 4.0),
        ("steps", True),
        ("height", "480"),
        ("num_frames", 17.0),
    ],
)
def test_numbers_outside_their_limits_are_refused_by_name(name, value):
    refused("frames" if name == "num_frames" else name, **{name: value})


def test_a_checkpoint_with_a_useless_frame_rate_is_found_before_the_run():
    with pytest.raises(ValueError, match="fps must be above 0"):
        validate_request({**DEFAULTS, "fps": 0}, "a cat")


@pytest.mark.parametrize("fps", [1e-9, 1e9])
def test_frame_rates_that_no_player_takes_are_found_before_the_run(fps):
    with pytest.raises(ValueError, match=r"fps must be from 0\.1 to 1000.*config\.json"):
        validate_request({**DEFAULTS, "fps": fps}, "a cat")


@pytest.mark.parametrize("scheduler", ["heun", "", None, ["euler"]])
def test_unknown_schedulers_list_the_choices(scheduler):
    with pytest.raises(ValueError, match=r"unknown scheduler.*unipc, dpm\+\+, euler"):
        validate_request({**DEFAULTS, "scheduler": scheduler}, "a cat")


@pytest.mark.parametrize("scheduler", ["unipc", "dpm++", "euler"])
@pytest.mark.parametrize("shift", [1e9, 1e-300])
def test_shifts_whose_noise_levels_coincide_are_refused_before_the_run(scheduler, shift):
    with pytest.raises(ValueError, match="4 steps with shift") as caught:
        validate_request(DEFAULTS, "a cat", scheduler=scheduler, shift=shift, steps=4)
    assert len(str(caught.value)) < 300


def test_a_shift_that_would_leave_the_noise_in_the_video_is_refused():
    refused("shift 1e-05 starts unipc at noise level 0.0099", scheduler="unipc", shift=1e-5)
    assert validate_request(DEFAULTS, "a cat", scheduler="unipc", shift=0.01).shift == 0.01


def test_a_mistyped_number_of_steps_is_refused_at_once():
    refused("steps must be at most 100000, got 1000000000000", steps=10**12)
    assert validate_request(DEFAULTS, "a cat", steps=1000).steps == 1000


def test_the_nearest_of_a_huge_number_of_frames_is_exact():
    refused(f"nearest is {10**26 + 1}$", num_frames=10**26)


@pytest.mark.parametrize("prompt", ["", "  \n", [], ["a cat", ""], [3], None, "\ufeff", "\u200b\u2028", "\0", "&nbsp;"])
def test_blank_and_missing_prompts_are_refused(prompt):
    refused("prompt", prompt)


@pytest.mark.parametrize("texts", [("a \udcff cat", None), ("a cat", "\ud800"), (["a cat"], ["\ud800"])])
def test_text_that_no_file_could_hold_is_refused_before_the_run(texts):
    with pytest.raises(ValueError, match=r"not valid Unicode at character \d .*PYTHONUTF8=1"):
        validate_request(DEFAULTS, *texts)


def test_a_negative_prompt_may_be_empty_and_serves_all_prompts():
    """B126."""
    assert validate_request(DEFAULTS, ["a", "b"], "").negative_prompts == ("", "")
    assert validate_request(DEFAULTS, ["a", "b"], ["x", "y"]).negative_prompts == ("x", "y")


@pytest.mark.parametrize("negatives", [["x"], ["x", "y", "z"], []])
def test_a_list_of_negative_prompts_must_match_the_prompts(negatives):
    """B126."""
    refused(f"{len(negatives)} negative prompts for 2 prompts", ["a", "b"], negatives)


def test_one_seed_serves_all_prompts_and_a_list_gives_one_each():
    """B126."""
    assert validate_request(DEFAULTS, ["a", "b"], seed=5).seeds == (5, 5)
    assert validate_request(DEFAULTS, ["a", "b"], seed=[5, 6]).seeds == (5, 6)
    refused("3 seeds for 2 prompts", ["a", "b"], seed=[1, 2, 3])


def test_minus_one_and_none_draw_seeds_that_differ():
    """B130."""
    drawn = [validate_request(DEFAULTS, ["a", "b"], seed=seed).seeds for seed in (-1, None, [-1, None])]
    flat = [seed for seeds in drawn for seed in seeds]
    assert len(set(flat)) == 6
    assert all(0 <= seed <= MAX_SEED for seed in flat)


@pytest.mark.parametrize("seed", [-2, 2**63, 2**64, 1.5, "7", True])
def test_seeds_outside_the_range_are_refused(seed):
    """B130."""
    refused("seed", seed=seed)


def test_the_largest_seed_is_legal():
    """B130."""
    assert validate_request(DEFAULTS, "a cat", seed=2**63 - 1).seeds == (2**63 - 1,)
