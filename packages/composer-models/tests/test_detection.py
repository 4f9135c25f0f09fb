import builtins

import pytest
import torch

from composer_models import MAP, MissingConditionalImportError


@pytest.fixture
def coco():
    pytest.importorskip("pycocotools", reason="the wheel alone comes without the extra coco")


def boxes(*rows):
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)


def detections(*rows, scores, labels=None):
    return {
        "boxes": boxes(*rows),
        "scores": torch.tensor(scores),
        "labels": torch.tensor(labels if labels is not None else [0] * len(rows)),
    }


def truth(*rows, labels=None):
    return {"boxes": boxes(*rows), "labels": torch.tensor(labels if labels is not None else [0] * len(rows))}


LARGE, ELSEWHERE = (0, 0, 100, 100), (200, 200, 300, 300)


def evaluate(preds, target, **kwargs):
    metric = MAP(**kwargs)
    metric.update(preds, target)
    return {name: value.tolist() for name, value in metric.compute().items()}


@pytest.mark.usefixtures("coco")
class TestMAP:
    def test_a_perfect_detection_scores_one_everywhere_it_can(self):
        scores = evaluate([detections(LARGE, scores=[0.9])], [truth(LARGE)])
        ones = {"map", "map_50", "map_75", "map_large", "mar_1", "mar_10", "mar_100", "mar_large"}
        assert scores == {name: 1.0 if name in ones else -1.0 for name in scores}
        assert list(scores) == [
            *("map", "map_50", "map_75", "map_small", "map_medium", "map_large"),
            *("mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large"),
            *("map_per_class", "mar_100_per_class"),
        ]

    def test_an_overlap_of_62_percent_counts_at_three_of_ten_thresholds(self):
        scores = evaluate([detections((0, 0, 100, 62), scores=[0.9])], [truth(LARGE)])
        assert (scores["map"], scores["map_50"], scores["map_75"]) == pytest.approx((0.3, 1.0, 0.0))

    def test_a_wrong_box_ahead_of_the_right_one_halves_the_precision(self):
        scores = evaluate([detections(ELSEWHERE, LARGE, scores=[0.9, 0.8])], [truth(LARGE)])
        assert scores["map"] == pytest.approx(0.5)
        assert (scores["mar_1"], scores["mar_100"]) == (0.0, 1.0)

    def test_one_of_two_objects_found_fills_51_of_101_recall_levels(self):
        scores = evaluate([detections(LARGE, scores=[0.9])], [truth(LARGE, ELSEWHERE)])
        assert scores["map"] == pytest.approx(51 / 101)
        assert scores["mar_100"] == pytest.approx(0.5)

    @pytest.mark.parametrize(("side", "size"), [(20, "small"), (50, "medium"), (100, "large")])
    def test_objects_count_towards_their_size(self, side, size):
        box = (10, 10, 10 + side, 10 + side)
        scores = evaluate([detections(box, scores=[0.9])], [truth(box)])
        by_size = {name: scores[f"map_{name}"] for name in ("small", "medium", "large")}
        assert by_size == {name: 1.0 if name == size else -1.0 for name in by_size}

    def test_each_class_can_have_its_own_scores(self):
        preds = [detections(LARGE, ELSEWHERE, scores=[0.9, 0.9], labels=[3, 7])]
        scores = evaluate(preds, [truth(LARGE, (400, 400, 500, 500), labels=[3, 7])], class_metrics=True)
        assert (scores["map"], scores["map_per_class"], scores["mar_100_per_class"]) == (0.5, [1.0, 0.0], [1.0, 0.0])

    def test_a_class_that_is_only_detected_has_no_score(self):
        preds = [detections(LARGE, ELSEWHERE, scores=[0.9, 0.9], labels=[1, 2])]
        scores = evaluate(preds, [truth(LARGE, labels=[1])], class_metrics=True)
        assert scores["map_per_class"] == [1.0, -1.0]

    def test_images_without_detections_or_objects_are_fine(self):
        nothing = detections(scores=[], labels=[])
        assert evaluate([nothing, nothing], [truth(LARGE), truth(labels=[])])["map"] == 0.0
        empty = evaluate([nothing], [truth(labels=[])], class_metrics=True)
        assert (empty["map"], empty["map_per_class"]) == (-1.0, [])

    def test_boxes_that_are_none_need_no_second_dim(self):
        nothing = {name: torch.tensor([]) for name in ("boxes", "scores", "labels")}
        assert evaluate([nothing], [truth(LARGE)])["map"] == 0.0

    def test_boxes_match_only_within_their_image(self):
        preds = [detections(LARGE, scores=[0.9]), detections(ELSEWHERE, scores=[0.9])]
        assert evaluate(preds, [truth(LARGE), truth(ELSEWHERE)])["map"] == 1.0
        assert evaluate(preds, [truth(ELSEWHERE), truth(LARGE)])["map"] == 0.0

    def test_batches_add_up(self):
        metric = MAP()
        metric.update([detections(LARGE, scores=[0.9])], [truth(LARGE)])
        metric.update([detections(scores=[], labels=[])], [truth(ELSEWHERE)])
        assert metric.compute()["map"].item() == pytest.approx(51 / 101)

    def test_nothing_is_printed(self, capsys):
        evaluate([detections(LARGE, scores=[0.9])], [truth(LARGE)])
        assert capsys.readouterr() == ("", "")

    def test_ranks_see_the_images_of_all_even_if_one_has_none(self):
        theirs = []
        other = MAP(dist_sync_fn=lambda tensor, group: theirs.append(tensor) or [tensor])
        other.sync(dist_sync_fn=other.dist_sync_fn, distributed_available=lambda: True)

        def gather(tensor, group):
            partner = theirs.pop(0)
            # Ranks can gather only tensors of one kind; lengths may differ.
            assert (tensor.ndim, tensor.dtype) == (partner.ndim, partner.dtype)
            return [tensor, partner]

        mine = MAP(dist_sync_fn=gather)
        mine.distributed_available_fn = lambda: True
        mine.update([detections(LARGE, scores=[0.9])], [truth(LARGE, ELSEWHERE)])
        assert mine.compute()["map"].item() == pytest.approx(51 / 101)

    @pytest.mark.parametrize(
        ("preds", "target", "message"),
        [
            ([], [truth(LARGE)], "preds has 0 images and target 1"),
            ([truth(LARGE)], [truth(LARGE)], r"preds\[0\] has no tensor 'scores'"),
            ([detections(LARGE, scores=[0.9])], [{"boxes": boxes(LARGE)}], r"target\[0\] has no tensor 'labels'"),
            (
                [detections(LARGE, scores=[0.9])],
                [{**truth(LARGE), "labels": [0]}],
                r"target\[0\] has no tensor 'labels'",
            ),
            (
                [{**detections(LARGE, scores=[0.9]), "boxes": torch.tensor([0.0, 0.0, 9.0, 9.0])}],
                [truth(LARGE)],
                r"preds\[0\]\['boxes'\] has shape \(4,\): an image with n boxes needs shape \(n, 4\)",
            ),
            (
                [detections(LARGE, scores=[0.9])],
                [{**truth(LARGE), "boxes": torch.zeros(1, 5)}],
                r"target\[0\]\['boxes'\] has shape \(1, 5\)",
            ),
            (
                [{**detections(LARGE, scores=[0.9]), "scores": torch.tensor(0.9)}],
                [truth(LARGE)],
                r"preds\[0\]\['scores'\] has shape \(\): an image with n boxes needs shape \(n,\)",
            ),
            (
                [detections(LARGE, scores=[0.9])],
                [{**truth(LARGE), "labels": torch.zeros(1, 2)}],
                r"target\[0\]\['labels'\] has shape \(1, 2\)",
            ),
            ([detections(LARGE, scores=[0.9, 0.8])], [truth(LARGE)], r"preds\[0\] has entries of different lengths"),
        ],
    )
    def test_what_cannot_be_evaluated_is_refused(self, preds, target, message):
        with pytest.raises(ValueError, match=message):
            MAP().update(preds, target)


def test_a_missing_pycocotools_shows_when_the_metric_is_made(monkeypatch):
    real_import = builtins.__import__

    def without_pycocotools(name, *args, **kwargs):
        if name.startswith("pycocotools"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pycocotools)
    with pytest.raises(MissingConditionalImportError, match=r"composer-models\[coco\]"):
        MAP()
