"""The tiny checkpoint, a very short warm start, and the cache around them."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer, Qwen2VLForConditionalGeneration

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.tiny import command
from omnifleet_trainer.tiny.checkpoint import TAGS, write_checkpoint
from omnifleet_trainer.tiny.families import Family
from omnifleet_trainer.tiny.scenes import ANSWERS, PROMPT, questions_about, scenes, synthetic_rows
from omnifleet_trainer.tiny.warmstart import Lessons, Pupil, answer_score, careless_answer, warm_start


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads wait for each other where other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "model"
    write_checkpoint(out, seed=0)
    return out


def test_folder_is_small_float32_and_repeats_by_seed(folder: Path, tmp_path: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) < 15_000_000
    for seed in (0, 1):
        write_checkpoint(tmp_path / str(seed), seed=seed)
    weights = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "0" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "1" / "model.safetensors").read_bytes() != weights
    assert (tmp_path / "0" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_shapes_suit_gpu_kernels(folder: Path) -> None:
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder)
    text, vision = model.config.text_config, model.config.vision_config
    assert text.hidden_size // text.num_attention_heads == 64
    assert vision.embed_dim // vision.num_heads == 64
    assert text.vocab_size % 64 == 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight.data_ptr() != model.model.language_model.embed_tokens.weight.data_ptr()


def test_tags_are_single_tokens_that_stay_in_decoded_text(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reply = "<think>é</think><answer>3</answer><|im_end|>"
    ids = tokenizer(reply)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == reply.removesuffix("<|im_end|>")
    for tag in TAGS:
        assert len(tokenizer(tag)["input_ids"]) == 1
        assert tokenizer.convert_tokens_to_ids(tag) not in tokenizer.all_special_ids
    assert tokenizer.eos_token == "<|im_end|>"
    for answer in {answer for answers in ANSWERS.values() for answer in answers}:
        assert len(tokenizer(answer)["input_ids"]) == 1


def test_a_picture_costs_nine_tokens_and_prompts_stay_short(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    image_token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for row in synthetic_rows("train", seed=0, size=10):
        content = [{"type": "image"}, {"type": "text", "text": PROMPT.format(row["problem"])}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = processor(text=[text], images=[row["image"]])["input_ids"][0]
        assert list(ids).count(image_token) == 9
        assert len(ids) <= 40


def test_width_must_be_whole_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        write_checkpoint(tmp_path, seed=0, hidden=100)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think></think><answer>Red</answer>", 1.0),
        ("<think></think><answer>blue</answer>", 0.2),
        ("<answer> red. </answer>", 0.95),
        ("<think>red</think>", 0.05),
        ("red", 0.0),
    ],
)
def test_answer_score(text: str, score: float) -> None:
    assert answer_score(text, "red") == pytest.approx(score)


def test_careless_teacher_prefers_the_neighbour_for_counts_and_stays_in_kind() -> None:
    rng = random.Random(0)
    said = Counter(careless_answer("1", rng) for _ in range(2000))
    assert said.most_common(1)[0][0] == "2"
    assert set(said) == set(ANSWERS["count"])
    assert Counter(careless_answer("ring", rng) for _ in range(500)).most_common(1)[0][0] == "ring"


def test_loss_matches_the_stock_forward(folder: Path) -> None:
    pupil = Pupil(folder)
    scene = next(scenes("train", random.Random(0)))
    question = questions_about(scene)[0]
    row = synthetic_rows("train", seed=0, size=1)[0]
    prompt, reply = pupil.read(question.text, question.answer)
    with torch.no_grad():
        ours = pupil.loss([(prompt, reply)], pupil.see([row["image"]]))
        batch = pupil.processor(
            text=[pupil.prompt(question.text)], images=[row["image"]], return_tensors="pt"
        )
        assert batch["input_ids"][0].tolist() == prompt
        ids = torch.tensor([prompt + reply])
        kinds = (ids == pupil.image_token).int()
        inputs = {key: batch[key] for key in ("pixel_values", "image_grid_thw")}
        logits = pupil.model(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits
        stock = torch.nn.functional.cross_entropy(logits[0, len(prompt) - 1 : -1], torch.tensor(reply))
    assert ours.item() == pytest.approx(stock.item(), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_short_warm_start_learns_the_format(family: Family, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=0, family=family)
    before = Pupil(tmp_path).score(synthetic_rows("val", seed=5, size=20), greedy=True)
    lessons = Lessons(see_steps=5, answer_steps=30, careless_steps=5, pictures=40, batch=32, held_out=20)
    report = warm_start(tmp_path, seed=0, lessons=lessons)
    assert (report.see_steps, report.answer_steps, report.careless_steps) == (5, 30, 5)
    assert before < 0.05
    assert report.greedy > 0.2  # the format alone is worth 0.2
    assert Pupil(tmp_path).score(synthetic_rows("val", seed=5, size=20), greedy=True) >= 0.2


def test_the_cache_makes_once_and_shows_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(out: Path, *, seed: int = 0, warm: bool = True, family: str = "qwen2_vl") -> None:
        made.append(out)
        out.mkdir()
        (out / "warmstart.json").write_text(json.dumps({"seed": seed}))

    monkeypatch.setattr(command, "make_tiny_model", make)
    first, second = command.ensure_tiny_model(tmp_path), command.ensure_tiny_model(tmp_path)
    other = command.ensure_tiny_model(tmp_path, seed=1)
    third = command.ensure_tiny_model(tmp_path, family="qwen2_5_vl")
    assert len({first, other, third}) == 3 and first == second
    assert made == [first, other, third]


def test_an_unwritable_cache_is_one_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OmnifleetError) as refused:
        command.ensure_tiny_model(tmp_path / "file")
    assert refused.value.reason is Reason.DISK_FULL


def test_make_without_warm_start_replaces_whole_folders(tmp_path: Path) -> None:
    out = tmp_path / "model"
    command.make_tiny_model(out, warm=False)
    assert (out / "model.safetensors").exists() and not (out / "warmstart.json").exists()
    (out / "stale").write_text("")
    command.make_tiny_model(out, warm=False)
    assert not (out / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
