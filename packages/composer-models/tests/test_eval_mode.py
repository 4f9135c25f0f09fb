import pytest
from torch import nn

from composer_models import model_eval_mode


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_eval_inside_and_back_afterwards(training):
    model = nn.Sequential(nn.Dropout()).train(training)
    with model_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert all(module.training is training for module in model.modules())


def test_the_mode_comes_back_after_an_error():
    model = nn.Dropout()
    with pytest.raises(ZeroDivisionError), model_eval_mode(model):
        raise ZeroDivisionError
    assert model.training


def test_a_frozen_batch_norm_stays_in_eval_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    with model_eval_mode(model):
        pass
    assert [module.training for module in model] == [True, False]


def test_a_model_with_its_own_train_is_told():
    class Told(nn.Module):
        told = ()

        def train(self, mode=True):
            self.told = (*self.told, mode)
            return super().train(mode)

    model = Told()
    with model_eval_mode(model):
        pass
    assert model.told == (False, True)
