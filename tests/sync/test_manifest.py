"""Buckets hold what went in, and notice what changed on the way."""

import json

import pytest
import torch

from qarl_openrlhf.sync import checksum
from qarl_openrlhf.sync.errors import ManifestError
from qarl_openrlhf.sync.manifest import Bucket, pack_buckets


def tensors():
    torch.manual_seed(0)
    return {
        "layers.0.weight_packed": torch.randint(-(2**31), 2**31 - 1, (6, 5), dtype=torch.int32),
        "layers.0.weight_scale": torch.randn(6, 3).to(torch.bfloat16),
        "layers.0.weight_shape": torch.tensor([6, 40]),
        "layers.1.weight": torch.randint(-128, 127, (7, 3), dtype=torch.int8),
        "layers.2.weight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "norm.weight": torch.randn(5),
        "transposed": torch.randn(3, 4).t(),
    }


@pytest.mark.parametrize("bucket_bytes", [1, 100, 130, 10**6])
def test_round_trip(bucket_bytes):
    sent, got, indices = tensors(), {}, []
    for bucket, flat in pack_buckets(sent.items(), version=7, bucket_bytes=bucket_bytes, with_checksums=True):
        assert flat.dtype == torch.uint8 and flat.nbytes == bucket.nbytes
        travelled = Bucket.from_dict(json.loads(json.dumps(bucket.to_dict())))
        assert travelled == bucket
        travelled.verify(flat)
        got |= travelled.views(flat)
        indices.append(bucket.index)
        assert bucket.version == 7
        assert len(bucket.entries) == 1 or bucket.nbytes <= bucket_bytes + 16
    assert indices == list(range(len(indices)))
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_one_flipped_bit_names_the_tensor():
    [(bucket, flat)] = pack_buckets(tensors().items(), version=1, bucket_bytes=10**6, with_checksums=True)
    entry = bucket.entries[3]
    flat[entry.offset + 4] ^= 1
    with pytest.raises(ManifestError, match=r"layers\.1\.weight .*checksum"):
        bucket.verify(flat)


def test_verification_off_means_no_checksums(monkeypatch):
    """Neither made nor compared; a NaN is still found."""
    [(bucket, flat)] = pack_buckets(tensors().items(), version=1, bucket_bytes=10**6, with_checksums=False)
    flat[bucket.entries[3].offset] ^= 1
    assert all(entry.checksum is None for entry in bucket.entries)
    made = []
    monkeypatch.setattr(checksum, "checksum", lambda piece: made.append(piece) or 0)
    bucket.verify(flat)
    assert not made
    for name in ("layers.0.weight_scale", "layers.2.weight", "norm.weight"):
        broken = flat.clone()
        bucket.views(broken)[name].view(-1)[1] = torch.nan
        with pytest.raises(ManifestError, match=f"tensor {name} has 1 NaN or infinite values"):
            bucket.verify(broken)


def test_a_name_twice_is_refused():
    pairs = [*tensors().items(), ("norm.weight", torch.zeros(5))]
    with pytest.raises(ManifestError, match="norm.weight is published twice"):
        list(pack_buckets(pairs, version=1, bucket_bytes=10**6, with_checksums=True))
