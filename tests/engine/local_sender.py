"""A trainer's side without a trainer: the sender of one rank, in this process, on given tensors."""

import asyncio

import torch

from rl.weights.sender import WeightSender
from rollout.processes import free_port


class LocalSender:
    """Implements ``rl.weights.sender.Sender``. ``named`` may be set to other weights."""

    def __init__(self, named, device="cpu"):
        self.named = named
        self.rank = WeightSender(lambda: iter(self.named), torch.device(device))

    def plan(self, bucket_bytes):
        return self.rank.plan(bucket_bytes)

    async def plan_weights(self, bucket_bytes):
        return self.rank.plan(bucket_bytes)

    async def rewind_weights(self):
        self.rank.rewind()

    async def fill_bucket(self):
        self.rank.fill()

    async def bucket_handles(self):
        return dict([self.rank.handle()])

    async def group_endpoint(self):
        return "127.0.0.1", free_port()

    async def open_group(self, group):
        await asyncio.to_thread(self.rank.join, group)

    async def broadcast_bucket(self):
        await asyncio.to_thread(self.rank.broadcast)

    async def close_group(self):
        await asyncio.to_thread(self.rank.leave)
