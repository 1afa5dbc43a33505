"""Fit a line with TensorFlow's parameter servers: a chief hands out the steps, workers compute
them, and servers hold the weights.

    dray submit --code . --requirements requirements.txt job.yaml

Every role runs this file and reads its role from TF_CONFIG. Workers and servers never exit by
themselves; the job ends when its chief exits. A worker that is killed is restarted while the others
continue. If the chief or a server is killed, all of them restart from the latest checkpoint.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import tensorflow as tf

STEPS_BETWEEN_SAVES = 50


def serve(resolver: tf.distribute.cluster_resolver.TFConfigClusterResolver) -> None:
    """Serve the chief's requests until the job terminates this process."""
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        start=True,
    )
    print(f"{resolver.task_type} {resolver.task_id} serves", flush=True)
    server.join()


def coordinate(
    resolver: tf.distribute.cluster_resolver.TFConfigClusterResolver, num_steps: int
) -> None:
    tf.get_logger().setLevel("INFO")  # so that the coordinator logs when a worker rejoins
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
        bias = tf.Variable(0.0)
        steps_done = tf.Variable(0, dtype=tf.int64)
    # Without this option each server would write its part to a folder on its own node.
    options = tf.train.CheckpointOptions(experimental_io_device="/job:chief/replica:0/task:0")
    checkpoints = tf.train.CheckpointManager(
        tf.train.Checkpoint(weight=weight, bias=bias, steps_done=steps_done),
        os.environ.get("DRAY_CHECKPOINT_DIR", "checkpoints"),
        max_to_keep=2,
    )
    if checkpoints.latest_checkpoint:
        checkpoints.checkpoint.restore(checkpoints.latest_checkpoint, options=options)
        print(f"goes on after step {int(steps_done.read_value())}", flush=True)

    def batches() -> tf.data.Dataset:
        random = np.random.default_rng(0)
        x = random.uniform(-1.0, 1.0, 512).astype(np.float32)
        y = 3.0 * x + 0.5 + random.normal(0.0, 0.01, x.shape).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(512).repeat().batch(32)

    @tf.function
    def step(iterator):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x * weight + bias - y) ** 2)
        by_weight, by_bias = tape.gradient(loss, [weight, bias])
        weight.assign_sub(0.1 * by_weight)
        bias.assign_sub(0.1 * by_bias)
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    while (done := int(steps_done.read_value())) < num_steps:
        some = min(STEPS_BETWEEN_SAVES, num_steps - done)
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(some)]
        coordinator.join()  # another worker repeats the steps of a lost one
        steps_done.assign(done + some)
        checkpoints.save(options=options)
        print(f"step {done + some}: loss {float(losses[-1].fetch()):.6f}", flush=True)
    print(
        f"chief: weight {float(weight.read_value()):.4f}, bias {float(bias.read_value()):.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
    else:
        coordinate(resolver, options.steps)


if __name__ == "__main__":
    main()
