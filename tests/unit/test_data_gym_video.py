"""Rows of NeMo Gym's video GRPO: every rule of conversion, validation and reading, on files of the test's own."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from omnifleet.config.recipe import SplitConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind
from omnifleet_trainer.data import load_split
from omnifleet_trainer.data.gym_convert import Counts, Rules, cleaned, convert, options_of
from omnifleet_trainer.data.gym_rows import check_row, clips_of, parts_of
from omnifleet_trainer.data.gym_video import _template_kwargs

QUESTION = "What moves? (A) a cat (B) a  red\n dog"
Row = dict[str, Any]


@pytest.fixture
def clip(tmp_path: Path) -> str:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"a clip")
    return str(path)


def converted(rows: list[Row], **rules: Any) -> tuple[list[Row], Counts]:
    counts = Counts()
    lines = [json.dumps(row) for row in rows]
    return list(convert(["", *lines, "  "], Rules(**rules), counts)), counts


def refused(rows: list[Row], **rules: Any) -> str:
    with pytest.raises(OmnifleetError) as caught:
        converted(rows, **rules)
    assert caught.value.message.startswith("line 2: ")
    return caught.value.message


def test_a_row_becomes_the_gyms_schema(clip: str) -> None:
    (row,), counts = converted(
        [{"question": f"<video>{QUESTION}", "video": f"file://{clip}", "answer": " b ", "id": 7}],
        system_prompt="Look.",
    )
    system, user = row["responses_create_params"]["input"]
    assert system == {"role": "system", "content": "Look."}
    assert user["content"][0] == {"type": "input_video", "video_url": clip}
    assert user["content"][1]["text"].startswith("What moves?") and r"\boxed{" in user["content"][1]["text"]
    assert row["responses_create_params"]["metadata"] == {"chat_template_kwargs": {"enable_thinking": True}}
    assert (row["expected_answer"], row["id"], counts.written) == ("B", 7, 1)
    assert row["options"] == [{"A": "a cat"}, {"B": "a red dog"}]
    assert row["grading_mode"] == "strict_single_letter_boxed"
    assert row["agent_ref"] == {"type": "responses_api_agents", "name": "mcqa_simple_agent"}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("<image> x <so_embedding>", "x\nPut your final answer within \\boxed{...}."),
        ("x. Final answer: ..", r"x. Final answer: \boxed{...}"),
        (r" say \boxed{A} ", r"say \boxed{A}"),
    ],
)
def test_prompts_are_cleaned_and_ask_for_a_box(text: str, clean: str) -> None:
    assert cleaned(text) == clean


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("(A) one (B) two", {"A": "one", "B": "two"}),
        ("A. one\nB. two\nA. again", {"A": "one", "B": "two"}),
        ("a) one b) two", {"A": "one", "B": "two"}),
        ("A: one B：two", {"A": "one", "B": "two"}),
        ("K. none\nJ. last", {"J": "last"}),
    ],
)
def test_options_are_read_in_every_spelling(text: str, options: dict[str, str]) -> None:
    assert options_of(text) == [{letter: said} for letter, said in options.items()]


def test_agents_follow_the_row_then_the_option_then_the_verifier(clip: str) -> None:
    own = {"agent_ref": {"type": "responses_api_agents", "name": "mine"}}
    base = {"prompt": "how many?", "video": clip, "answer": 3}
    rows, _ = converted(
        [{**base, **own}, {**base, "verifier": "mathruler"}], deduplicate=False, agent_name=""
    )
    assert [row["agent_ref"]["name"] for row in rows] == ["mine", "math_with_judge_simple_agent"]
    assert rows[1]["expected_answer"] == "3" and "options" not in rows[1]
    (row,), _ = converted([{**base, "verifier": "mathruler"}], agent_name="given")
    assert row["agent_ref"]["name"] == "given"
    assert "verifier 'poetry' is unknown" in refused([{**base, "verifier": "poetry"}])


def test_what_cannot_be_a_row_is_refused_by_its_line(clip: str) -> None:
    good = {"prompt": QUESTION, "video": clip, "answer": "A"}
    assert "names 2 clips" in refused([{**good, "video": [clip, clip]}])
    assert "names 0 clips" in refused([{**good, "video": None}])
    assert "no file" in refused([{**good, "video": clip + "x"}])
    assert "only local files" in refused([{**good, "video": "https://example.org/a.mp4"}])
    assert "not absolute" in refused([{**good, "video": "clip.mp4"}])
    assert "prompt is no text" in refused([{**good, "prompt": 3}])
    assert "no options" in refused([{**good, "prompt": "what?"}])
    assert "none of the options" in refused([{**good, "answer": "C"}])
    assert "answer is no text" in refused([{**good, "answer": None}])
    with pytest.raises(OmnifleetError, match="line 1: not JSON"):
        list(convert(["{"], Rules(), Counts()))


def test_rows_are_skipped_and_counted_as_asked(clip: str) -> None:
    good = {"prompt": QUESTION, "videos": [clip], "answer": "A"}
    rows, counts = converted(
        [
            good,
            good,
            {**good, "videos": []},
            {**good, "videos": [clip + "x"]},
            {**good, "prompt": f"Now: {QUESTION}"},
        ],
        skip_without_video=True,
        skip_missing=True,
    )
    assert (len(rows), counts) == (2, Counts(written=2, without_video=1, missing=1, duplicates=1))
    assert len(converted([good, good], deduplicate=False)[0]) == 2
    assert len(converted([good, {**good, "prompt": QUESTION + "!"}], max_rows=1)[0]) == 1


def valid(clip: str) -> Row:
    return converted([{"prompt": QUESTION, "video": clip, "answer": "A"}])[0][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agent_ref": {"name": " "}}, "agent_ref.name"),
        ({"expected_answer": ""}, "expected_answer"),
        ({"expected_answer": "K"}, "none of A to J"),
        ({"options": [{"A": "x"}]}, "two options"),
        ({"options": [{"A": "x"}, {"A": "y"}]}, "not unique"),
        ({"options": [{"A": "x"}, {"B": " "}]}, "one letter"),
        ({"options": [{"A": "x"}, {"B": "y", "C": "z"}]}, "one letter"),
        ({"options": [{"B": "x"}, {"C": "y"}]}, "none of the options"),
        ({"responses_create_params": {"input": "what?"}}, "list of messages"),
        ({"responses_create_params": {"input": [{"role": "user", "content": "what?"}]}}, "exactly one clip"),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "smell"}]}]}},
            "type 'smell'",
        ),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_video"}]}]}},
            "no source",
        ),
    ],
)
def test_validation_names_what_is_wrong(clip: str, change: Row, words: str) -> None:
    check_row(valid(clip))
    with pytest.raises(OmnifleetError, match=words):
        check_row({**valid(clip), **change})


def test_media_must_lie_below_the_allowed_roots_links_resolved(clip: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.mp4").symlink_to(clip)
    row = json.loads(json.dumps(valid(clip)).replace(clip, str(inside / "link.mp4")))
    check_row(row, roots=[tmp_path])
    with pytest.raises(OmnifleetError) as caught:
        check_row(row, roots=[inside])
    assert caught.value.reason is Reason.FORBIDDEN


def with_parts(clip: str, *parts: Row) -> Row:
    row = copy.deepcopy(valid(clip))
    row["responses_create_params"]["input"][0]["content"] = [*parts, {"type": "input_text", "text": "what?"}]
    return row


def test_several_clips_and_sounds_go_beyond_the_reference(clip: str) -> None:
    video = {"type": "input_video", "video_url": clip}
    two = with_parts(clip, video, video, {"type": "input_audio", "audio_url": clip})
    with pytest.raises(OmnifleetError, match="exactly one"):
        check_row(two)
    parts = check_row(two, several=True)
    assert len(clips_of(parts)) == 2 and parts.media[MediaKind.AUDIO] == [clip]
    spoken = with_parts(
        clip, video, {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}
    )
    assert parts_of(spoken).media[MediaKind.AUDIO] == ["data:audio/wav;base64,UklG"]


def test_cached_frames_are_one_clip_and_mix_with_nothing(clip: str) -> None:
    def frame(source: str = "v") -> Row:
        return {"type": "input_image", "image_url": clip, "_is_video_frame": True, "_video_source": source}

    (url,) = clips_of(parts_of(with_parts(clip, frame(), frame())))
    head, _, payload = url.partition(";base64,")
    magic, _, body = base64.b64decode(payload).partition(b"\n")
    assert (head, magic) == ("data:video/x-nemo-rl-cached-frames", b"NEMO_RL_CACHED_VIDEO_FRAMES_V1")
    manifest = json.loads(body)
    assert manifest["frame_paths"] == [clip, clip] and manifest["metadata"]["frames_indices"] == [0, 1]
    still = {"type": "input_image", "image_url": clip}
    video = {"type": "input_video", "video_url": clip}
    for wrong in ((frame(), still), (frame(), video), (frame("a"), frame("b")), (frame(""),)):
        with pytest.raises(OmnifleetError, match="frames"):
            clips_of(parts_of(with_parts(clip, *wrong)))


def test_the_reader_gives_prompt_rows_that_an_environment_plays(clip: str, tmp_path: Path) -> None:
    rows, _ = converted(
        [{"prompt": QUESTION, "video": clip, "answer": "A", "level": 2}], system_prompt="Look."
    )
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    split = SplitConfig(dataset="gym-video", path=tmp_path)
    assert split.environment == "omnifleet.environments.ask_once:AskOnce"
    (row,) = load_split(split, seed=0)
    assert row.clips == (f"file://{clip}",) and row.answer == "A" and row.task == "gym-video"
    assert row.extra["system"] == "Look." and row.extra["level"] == 2
    assert row.extra["chat_template_kwargs"] == {"enable_thinking": True}
    assert row.extra["options"] == [{"A": "a cat"}, {"B": "a red dog"}]


def test_template_arguments_are_objects_or_their_json() -> None:
    assert _template_kwargs({"chat_template_kwargs": '{"enable_thinking": false}'}) == {
        "enable_thinking": False
    }
    assert _template_kwargs({"extra_body": {"enable_thinking": True}}) == {"enable_thinking": True}
    for wrong in ("", "[1]", 3):
        with pytest.raises(OmnifleetError):
            _template_kwargs({"chat_template_kwargs": wrong})
