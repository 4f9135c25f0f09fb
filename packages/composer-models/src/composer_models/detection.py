"""Mean average precision of object detection, by the rules of COCO."""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from composer_models.optional import MissingConditionalImportError

__all__ = ["MAP"]

_NAMES = (
    *("map", "map_50", "map_75", "map_small", "map_medium", "map_large"),
    *("mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large"),
)
_PREDICTION_KEYS = ("boxes", "labels", "scores")
_TARGET_KEYS = ("boxes", "labels")


class MAP(Metric):
    """Mean average precision and recall of bounding boxes.

    Args:
        class_metrics: Compute both also per class, from the same evaluation.
        dist_sync_on_step: Synchronize over ranks at every `forward` of the metric.
        process_group: The ranks to synchronize over. All if `None`.
        dist_sync_fn: Function that gathers a tensor from these ranks. That of torchmetrics if `None`.

    Raises:
        MissingConditionalImportError: If pycocotools is not installed; the extra `coco` provides it.

    Reference:
        Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, arXiv:1405.0312.
    """

    full_state_update = True
    is_differentiable = False
    higher_is_better = True

    # One entry per image. Gathered states are concatenated, so the counts mark where each image ends. All states are
    # flat and have the metric's dtype, as the empty tensors that torchmetrics creates for a rank without images.
    detection_boxes: list[Tensor]
    detection_scores: list[Tensor]
    detection_labels: list[Tensor]
    detection_counts: list[Tensor]
    groundtruth_boxes: list[Tensor]
    groundtruth_labels: list[Tensor]
    groundtruth_counts: list[Tensor]

    def __init__(
        self,
        class_metrics: bool = False,
        dist_sync_on_step: bool = False,
        process_group: Any | None = None,
        dist_sync_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step, process_group=process_group, dist_sync_fn=dist_sync_fn)
        _coco_evaluation()  # so that a missing package is an error before any evaluation
        self.class_metrics = class_metrics
        for kind, keys in (("detection", _PREDICTION_KEYS), ("groundtruth", _TARGET_KEYS)):
            for key in (*keys, "counts"):
                self.add_state(f"{kind}_{key}", default=[], dist_reduce_fx="cat")

    def update(self, preds: Sequence[Mapping[str, Tensor]], target: Sequence[Mapping[str, Tensor]]) -> None:
        """Add the boxes of a batch of images.

        Args:
            preds: One mapping per image with `'boxes'` of shape `(detections, 4)` as `x_min, y_min, x_max, y_max` in
                pixels, and `'scores'` and `'labels'` of shape `(detections,)`.
            target: One mapping per image with `'boxes'` and `'labels'`.

        Raises:
            ValueError: If an entry is missing, is not a tensor, has another shape, or differs in length from others.
        """
        if len(preds) != len(target):
            raise ValueError(
                f"preds has {len(preds)} images and target {len(target)}: give both for the same images, in order."
            )
        # All images are checked before the first is added, so that an error leaves the metric unchanged.
        for name, images, keys in (("preds", preds, _PREDICTION_KEYS), ("target", target, _TARGET_KEYS)):
            for index, image in enumerate(images):
                _check_image(f"{name}[{index}]", image, keys)
        for image in preds:
            self._add("detection", image, _PREDICTION_KEYS)
        for image in target:
            self._add("groundtruth", image, _TARGET_KEYS)

    def compute(self) -> dict[str, Tensor]:
        """Evaluate all images.

        Returns:
            Scalars under `map`, `map_50`, `map_75`, `map_small`, `map_medium`, `map_large`, `mar_1`, `mar_10`,
            `mar_100`, `mar_small`, `mar_medium` and `mar_large`, -1 if there is nothing to average; and under
            `map_per_class` and `mar_100_per_class` one value per class in ascending order, or -1 without
            `class_metrics`.
        """
        coco_class, coco_eval_class = _coco_evaluation()
        detections = self._annotations("detection", _PREDICTION_KEYS)
        groundtruths = self._annotations("groundtruth", _TARGET_KEYS)
        image_ids = list(range(len(_values(self.groundtruth_counts))))
        class_ids = sorted({annotation["category_id"] for annotation in (*detections, *groundtruths)})
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress and results
            evaluation = coco_eval_class(
                _coco(coco_class, groundtruths, image_ids, class_ids),
                _coco(coco_class, detections, image_ids, class_ids),
                iouType="bbox",
            )
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        results = {name: torch.tensor(float(value)) for name, value in zip(_NAMES, evaluation.stats, strict=True)}
        # Axes of precision: thresholds, recalls, classes, areas, limits; of recall the same without recalls. Area 0 is
        # "all", limit -1 the 100 detections per image with the highest scores.
        precision = torch.as_tensor(evaluation.eval["precision"][:, :, :, 0, -1]).flatten(0, 1)
        recall = torch.as_tensor(evaluation.eval["recall"][:, :, 0, -1])
        for name, values in (("map_per_class", precision), ("mar_100_per_class", recall)):
            # pycocotools marks missing values with -1.
            valid = [of_class[of_class > -1] for of_class in values.unbind(dim=1)]
            means = [of_class.mean().item() if len(of_class) else -1.0 for of_class in valid]
            results[name] = torch.tensor(means if self.class_metrics else -1.0)
        return results

    def _add(self, kind: str, image: Mapping[str, Tensor], keys: Sequence[str]) -> None:
        for key in keys:
            getattr(self, f"{kind}_{key}").append(image[key].detach().to(self.dtype).flatten())
        labels = image["labels"]
        # torch.full runs on the device, whereas torch.tensor copies from the host and synchronizes.
        count = torch.full((1,), len(labels), dtype=self.dtype, device=labels.device)
        getattr(self, f"{kind}_counts").append(count)

    def _annotations(self, kind: str, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Return all boxes of one kind in the format of COCO."""
        coordinates, *columns = (_values(getattr(self, f"{kind}_{key}")) for key in keys)
        boxes = [coordinates[i : i + 4] for i in range(0, len(coordinates), 4)]
        counts = _values(getattr(self, f"{kind}_counts"))
        images = [image for image, count in enumerate(counts) for _ in range(int(count))]
        annotations: list[dict[str, Any]] = []
        for image, (x_min, y_min, x_max, y_max), label, *score in zip(images, boxes, *columns, strict=True):
            width, height = x_max - x_min, y_max - y_min
            box = {"bbox": [x_min, y_min, width, height], "area": width * height, "iscrowd": 0}
            annotations.append(
                {"image_id": image, "category_id": int(label), **box, **({"score": score[0]} if score else {})}
            )
        return annotations


def _coco_evaluation() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO  # the extra `coco`
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise MissingConditionalImportError("coco", "pycocotools", distribution="composer-models") from error
    return COCO, COCOeval


def _check_image(name: str, image: Mapping[str, Tensor], keys: Sequence[str]) -> None:
    for key in keys:
        if not isinstance(image.get(key), Tensor):
            raise ValueError(f"{name} has no tensor {key!r}: each image needs {', '.join(map(repr, keys))}.")
        shape, of_a_box = image[key].shape, (4,) if key == "boxes" else ()
        if not shape or (shape[1:] != of_a_box and shape != (0,)):  # an image without boxes needs no second dim
            accepted = "(n, 4)" if of_a_box else "(n,)"
            raise ValueError(
                f"{name}[{key!r}] has shape {tuple(shape)}: an image with n boxes needs shape {accepted}, also if n "
                f"is 1."
            )
    lengths = {key: len(image[key]) for key in keys}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{name} has entries of different lengths, {lengths}: each needs one value for each box.")


def _values(state: list[Tensor] | Tensor) -> list[float]:
    # After synchronization a state is one tensor; before the first update it is an empty list.
    return dim_zero_cat(state).tolist() if len(state) else []


def _coco(coco_class: Any, annotations: list[dict[str, Any]], image_ids: list[int], class_ids: list[int]) -> Any:
    coco = coco_class()
    coco.dataset = {
        "images": [{"id": image} for image in image_ids],
        "categories": [{"id": category} for category in class_ids],
        # Ids start at 1: pycocotools treats a match with id 0 as no match.
        "annotations": [{**annotation, "id": number} for number, annotation in enumerate(annotations, start=1)],
    }
    coco.createIndex()
    return coco
