"""Evaluation on tasks of lm-eval during training: values computed by hand, ranks, and training that is not affected."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerGPT, HuggingFaceModel
from composer.utils import dist
from composer_dist.testing import run_ranks
from composer_models.gpt import GPTConfig

pytest.importorskip("lm_eval")

WORDS = ["<end>", *(f"w{number}" for number in range(31))]
QUESTIONS = [
    {"text": f"w{n} w{n + 1}" + " w3" * (n % 3), "choices": [f"w{n + 2}", f"w{n + 5} w{n}"], "label": n % 2}
    for n in range(11)
]
LONG = " w9 w1 w9 w2 w8 w7 w4 w5 w6 w20 w21 w22 w23"


def make_tokenizer(*, adds_bos=False):
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bos = {}
    if adds_bos:
        words.post_processor = processors.TemplateProcessing(single="w30 $A", special_tokens=[("w30", 31)])
        bos = {"bos_token": "w30"}
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<end>", **bos)


def make_model(kind):
    torch.manual_seed(5)
    if kind == "gpt":
        model = ComposerGPT(
            GPTConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=32, max_seq_len=12, resid_pdrop=0.1)
        )
        for weight in model.parameters():
            weight.data.mul_(4)  # so that the choices differ clearly
        return model
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        attention_dropout=0.1,
        initializer_range=0.3,
        eos_token_id=0,
    )
    return HuggingFaceModel(LlamaForCausalLM(config), make_tokenizer(), use_logits=True)


def make_tasks(folder, model):
    """Return tasks of each kind of request, with documents in a local file.

    Every second answer is what the model writes greedily, up to its second word.
    """
    path = folder / "questions.jsonl"
    if not path.exists():
        answers = [written(model, question["text"]) for question in QUESTIONS]
        answers = [answer if n % 2 == 0 else "w0 w0 w0" for n, answer in enumerate(answers)]
        lines = [{**question, "answer": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(path)},
            "cache_dir": str(folder / f"cache{dist.get_global_rank()}"),
        },
        "test_split": "test",
    }
    choice = {"doc_to_text": "{{text}}", "doc_to_target": "label", "doc_to_choice": "{{choices}}"}
    text = "{{text}}" + LONG
    words = {"doc_to_text": "", "doc_to_target": text}
    greedy = {"doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
    return [
        {"task": "choice", "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}], **choice, **shared},
        {
            "task": "words",
            "output_type": "loglikelihood_rolling",
            "metric_list": [{"metric": "word_perplexity"}],
            **words,
            **shared,
        },
        {
            "task": "greedy",
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["w31"], "max_gen_toks": 3, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
            **greedy,
            **shared,
        },
    ]


def written(model, text):
    tokens = context = make_tokenizer().encode(text)
    while len(tokens) < len(context) + 3:
        tokens = [*tokens, int(logits_of(model, tokens)[0, -1].argmax())]
        if tokens[-1] == 0:
            break
    model.train()
    return make_tokenizer().decode(tokens[len(context) :], skip_special_tokens=True)


def batches():
    tokens = torch.arange(8 * 6).reshape(8, 6) % 32
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    return DataLoader(samples, batch_size=4 // dist.get_world_size(), sampler=dist.get_sampler(samples))


def fit(kind, folder, *, evaluates=True, fsdp=False, lr=0.0):
    """Train for two batches; return what was logged, and the weights."""
    from composer_hf import LMEvalHarness

    model, log = make_model(kind), InMemoryLogger()
    harness = LMEvalHarness(make_tasks(folder, model), "1ba", tokenizer=make_tokenizer(), batch_size=2)
    with Trainer(
        model=model,
        train_dataloader=batches(),
        max_duration="2ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        callbacks=[harness] if evaluates else [],
        loggers=log,
        parallelism_config={"fsdp": {}} if fsdp else None,
        device="cpu",
        seed=3,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        is_training = trainer.state.model.training
        weights = {} if fsdp else {name: weight.clone() for name, weight in model.state_dict().items()}
    found = {name: values[-1][1] for name, values in log.data.items() if name.startswith("metrics/lm_eval")}
    return found, weights, model, is_training


def logits_of(model, tokens):
    model.eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        outputs = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_results_are_those_computed_by_hand(kind, tmp_path):
    found, _, model, _ = fit(kind, tmp_path)
    encode = make_tokenizer().encode
    num_right, total, num_words = 0, 0.0, 0
    for question in QUESTIONS:
        context = encode(question["text"])
        scores = []
        for choice in question["choices"]:
            target = encode(choice)
            logprobs = logits_of(model, context + target)[0].log_softmax(-1)
            scores.append(sum(float(logprobs[len(context) + n - 1, t]) for n, t in enumerate(target)))
        num_right += scores.index(max(scores)) == question["label"]
        rolled = encode(question["text"] + LONG)
        num_words += len(rolled)
        for place, token in enumerate(rolled):
            # 12 positions; the last window is moved back to have as much context as possible.
            start = 0 if place < 12 else len(rolled) - 12
            seen = ([0, *rolled])[start : place + 1]
            total += float(logits_of(model, seen)[0, -1].log_softmax(-1)[token])
    assert found["metrics/lm_eval/choice/acc"] == pytest.approx(num_right / len(QUESTIONS))
    perplexity = float(torch.tensor(-total / num_words).exp())
    assert found["metrics/lm_eval/words/word_perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["metrics/lm_eval/greedy/exact_match"] == 6 / 11


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_training_is_the_same_to_the_last_bit_without_evaluation(kind, tmp_path):
    _, weights, _, is_training = fit(kind, tmp_path, lr=0.1)
    _, expected, _, was_training = fit(kind, tmp_path, lr=0.1, evaluates=False)
    assert is_training == was_training
    assert all(map(torch.equal, weights.values(), expected.values()))


def on_ranks(kind, folder):
    from pathlib import Path

    return fit(kind, Path(folder), fsdp=True)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_two_ranks_with_fsdp_log_what_one_process_logs(kind, tmp_path):
    expected = fit(kind, tmp_path)[0]
    first, second = run_ranks(on_ranks, kind, str(tmp_path), store=tmp_path / "store", timeout_s=400)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adds_bos", [False, True])
def test_results_are_those_of_the_class_of_lm_eval_for_transformers(adds_bos, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from composer_hf import LMEvalHarness

    model, tokenizer = make_model("llama"), make_tokenizer(adds_bos=adds_bos)
    tasks = make_tasks(tmp_path, model)
    model.model.generation_config.eos_token_id = [0, 2]
    harness = LMEvalHarness(tasks, tokenizer=tokenizer, batch_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Trainer(model=model, optimizers=optimizer, device="cpu", progress_bar=False) as trainer:
        found = harness.evaluate(trainer.state, trainer.logger)
    theirs = HFLM(pretrained=model.model.eval(), tokenizer=tokenizer, batch_size=1, device="cpu", max_length=12)
    index = TaskManager(include_defaults=False)  # which reads no file
    tasks = make_tasks(tmp_path, model)
    results = simple_evaluate(theirs, tasks=tasks, task_manager=index, bootstrap_iters=0)["results"]
    for task, metric in (("choice", "acc"), ("words", "word_perplexity"), ("greedy", "exact_match")):
        assert found[f"metrics/lm_eval/{task}/{metric}"] == pytest.approx(results[task][f"{metric},none"], rel=1e-5)


@pytest.mark.slow
def test_groups_are_averaged_and_each_evaluation_is_the_first_again(tmp_path):
    from composer_hf import LMEvalHarness

    model = make_model("llama")
    choice, _, greedy = make_tasks(tmp_path, model)
    for task in (choice, {**choice, "task": "again"}):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task))
    group = {"group": "both", "task": ["choice", "again"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "both.yaml").write_text(json.dumps(group))
    harness = LMEvalHarness(["both", greedy], tokenizer=make_tokenizer(), include_path=str(tmp_path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Trainer(model=model, optimizers=optimizer, device="cpu", progress_bar=False) as trainer:
        found, again = (harness.evaluate(trainer.state, trainer.logger) for _ in range(2))
    assert found == again
    accuracies = {found[f"metrics/lm_eval/{name}/acc"] for name in ("both", "choice", "again")}
    assert len(accuracies) == 1
    assert found["metrics/lm_eval/greedy/exact_match"] == 6 / 11


def test_a_model_without_a_tokenizer_is_refused_before_training(tmp_path):
    from composer_hf import LMEvalHarness

    model = make_model("gpt")
    with (
        pytest.raises(ValueError, match="the tokenizer is missing"),
        Trainer(
            model=model,
            train_dataloader=batches(),
            max_duration="1ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=1e-3),
            callbacks=[LMEvalHarness(make_tasks(tmp_path, model), "1ba")],
            device="cpu",
            progress_bar=False,
        ) as trainer,
    ):
        trainer.fit()


def test_an_unknown_task_is_refused_before_training(tmp_path):
    from composer_hf import LMEvalHarness

    model, known = make_model("gpt"), make_tasks(tmp_path, make_model("gpt"))[0]
    harness = LMEvalHarness([known, "hellaswagg"], "1ba", tokenizer=make_tokenizer())
    with (
        Trainer(
            model=model,
            train_dataloader=batches(),
            max_duration="1ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=1e-3),
            callbacks=[harness],
            device="cpu",
            progress_bar=False,
        ) as trainer,
        pytest.raises(ValueError, match=r"cannot be loaded: .*'hellaswagg' is not"),
    ):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0
