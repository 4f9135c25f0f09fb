from composer_time import Serializable, Time, Timestamp


def test_the_base_keeps_nothing_and_loads_anything():
    thing = Serializable()
    thing.load_state_dict({"unknown": 1})
    assert thing.state_dict() == {}


def test_a_subclass_without_slots_has_attributes():
    class Counter(Serializable):
        def __init__(self):
            self.count = 0

    counter = Counter()
    counter.count += 1
    assert counter.count == 1


def test_time_and_timestamp_are_serializable():
    assert issubclass(Time, Serializable)
    assert issubclass(Timestamp, Serializable)
    assert Time(1, "ep").state_dict() == {}
