"""What one evaluation finds and leaves: metrics, subset, batches."""

import torch
from torchmetrics import SumMetric

from composer.core import Callback, DataSpec, Evaluator, Event


def test_each_evaluation_starts_its_metrics_anew(make_trainer, make_model, make_loader):
    model = make_model()
    model.val_metrics = SumMetric()
    model.update_metric = lambda batch, outputs, metric: metric.update(len(batch[1]))
    trainer = make_trainer(model=model, eval_dataloader=make_loader(13, 4))
    for _ in range(2):
        trainer.eval()
        assert int(trainer.state.eval_metric_values["SumMetric"]) == 13


def test_an_evaluators_own_subset_counts_in_fit(make_trainer, make_loader, recorder):
    evaluators = [
        Evaluator(label="some", dataloader=make_loader(10, 2), subset_num_batches=2),
        Evaluator(label="all", dataloader=make_loader(10, 2)),
    ]
    trainer = make_trainer(eval_dataloader=evaluators, max_duration="1ep", loggers=recorder)
    trainer.fit()
    assert recorder.count(Event.EVAL_BATCH_END) == 2 + 5


def test_microbatch_transforms_apply_to_the_microbatches_of_an_evaluation(make_trainer, make_loader, make_data):
    seen = []

    class Inputs(Callback):
        def eval_before_forward(self, state, logger):
            seen.append(state.batch[0])

    spec = DataSpec(make_loader(8, 4), microbatch_transforms=lambda batch: (batch[0] * 2, batch[1]))
    evaluator = Evaluator(label="eval", dataloader=spec, device_eval_microbatch_size=2)
    make_trainer(eval_dataloader=evaluator, callbacks=Inputs()).eval()
    assert [len(inputs) for inputs in seen] == [2] * 4
    assert torch.equal(torch.cat(seen), make_data(8).tensors[0] * 2)


def test_the_whole_batch_is_back_when_its_evaluation_ends(make_trainer, make_loader):
    sizes = []

    class Sizes(Callback):
        def eval_batch_end(self, state, logger):
            sizes.append(len(state.batch[0]))

    evaluator = Evaluator(label="eval", dataloader=make_loader(6, 4), device_eval_microbatch_size=1)
    make_trainer(eval_dataloader=evaluator, callbacks=Sizes()).eval()
    assert sizes == [4, 2]
