"""Plan a run: how long it is in batches, when to save, and how far it has come, without PyTorch."""

from composer_time import Time, Timestamp

samples, batch_size = 1_000, 32
batches_per_epoch = -(-samples // batch_size)
max_duration = Time.from_timestring("2ep")
save_every = Time.from_timestring("0.25dur")

length = int(max_duration) * batches_per_epoch
saves = []
now = Timestamp()
while now < max_duration:
    for _ in range(batches_per_epoch):
        now = now.to_next_batch(samples=batch_size)
        if int(now.batch) % int(length * save_every.value) == 0:
            saves.append(str(now.batch))
    now = now.to_next_epoch()

assert (now.epoch, now.batch) == ("2ep", f"{length}ba")
assert saves == ["16ba", "32ba", "48ba", "64ba"]
print(f"{length} batches, checkpoints at {', '.join(saves)}")
