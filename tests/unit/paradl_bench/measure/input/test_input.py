"""``paradl-bench io``: from images on disk to the terms that a prediction of the input side takes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from calibrate.fitting.fit import fit_profile
from calibrate.fitting.input_fit import InputRecords, fit_input
from calibrate.profile.input_side import BatchInput, HostCopy, InputSide, LoaderRate, PartTime, h2d_seconds, io_seconds
from calibrate.profile.profile import read_profile, write_profile
from paradl_bench.commands.io import COMMAND
from paradl_bench.core.errors import UserError
from paradl_bench.measure.input.files import time_files
from paradl_bench.measure.input.folder import find_images, labels_of
from paradl_bench.measure.input.image_batches import ImageBatches, ReadBatch, Unreadable
from paradl_bench.measure.input.images import (
    decode,
    drop_from_cache,
    make_images,
    read_file,
    transform,
)
from paradl_bench.measure.input.measuring import InputRequest, measure_input
from paradl_bench.measure.input.summary import summarise_input
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.input_record import (
    BATCHES_FILE,
    FILES_FILE,
    LOADER_FILE,
    BatchSamples,
    FileSamples,
    LoaderSamples,
    UnreadableFile,
)
from paradl_bench.records.measurement import read_manifest, read_records

ALONE = RankContext(
    rank=0, ranks=1, local_rank=0, device=torch.device("cpu"), backend="none", launcher="own", core=None
)
CORES = frozenset(os.sched_getaffinity(0))


def small_images(folder: Path, count: int) -> list[Path]:
    """Images of a few pixels in nested folders, JPEG and PNG."""
    paths = [folder / f"split{i % 2}" / f"class{i % 3}" / f"{i}.{'jpg' if i % 2 else 'PNG'}" for i in range(count)]
    for index, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (40 + index, 60, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    return sorted(paths)


def request(source: str, **changes: object) -> InputRequest:
    base = InputRequest(
        source=source,
        device="cpu",
        batches=(2,),
        workers=(0, 1),
        samples=6,
        crop=16,
        blocks=2,
        loader_batches=2,
        start="fork",
    )
    return msgspec.structs.replace(base, **changes)


def test_a_folder_is_measured_resumed_and_fitted(tmp_path: Path) -> None:
    images = small_images(tmp_path / "images", 6)
    broken = {"cut.jpg": images[-1].read_bytes()[:60], "text.png": b"no image", "empty.jpg": b""}
    for name, content in broken.items():
        (tmp_path / "images" / name).write_bytes(content)
    wanted = request(str(tmp_path / "images"), samples=20)
    directory = tmp_path / "io"
    measure_input(wanted, ALONE, CORES, directory, ("paradl-bench", "io"))
    manifest = read_manifest(directory)
    assert (manifest.kind, manifest.complete) == ("input", True)
    found = summarise_input(directory)
    reasons = {Path(item.path).name: item.why for item in found.unreadable}
    assert set(reasons) == set(broken)
    assert {name: why for name, why in reasons.items() if name != "cut.jpg"} == {
        "text.png": "no image, or of a format that Pillow does not read",
        "empty.jpg": "the file is empty",
    }
    assert [loader.workers for loader in found.loaders] == [0, 1]
    files = read_records(directory, FILES_FILE, FileSamples)
    assert [len(record.read_s) for record in files] == [6] * 4
    before = {name: (directory / name).read_bytes() for name in (FILES_FILE, BATCHES_FILE, LOADER_FILE)}
    loaded = (directory / LOADER_FILE).read_bytes().splitlines(keepends=True)
    (directory / LOADER_FILE).write_bytes(b"".join(loaded[:-1]))
    measure_input(wanted, ALONE, CORES, directory, ("paradl-bench", "io"))
    assert len(read_records(directory, LOADER_FILE, LoaderSamples)) == len(loaded)
    assert (directory / FILES_FILE).read_bytes() == before[FILES_FILE]
    with pytest.raises(UserError, match="measured with crop 16, not 32"):
        measure_input(request(wanted.source, samples=20, crop=32), ALONE, CORES, directory, ())
    profile = fit_profile([directory], command_line=("calibrate", "fit"), force=False)
    (side,) = profile.input_side
    assert (side.source, side.unreadable, side.sample_bytes) == (wanted.source, 3, 3 * 16 * 16 * 4)
    assert [rate.workers for rate in side.loader] == [0, 1]
    assert side.decode is not None
    assert side.decode.mean_s > 0
    write_profile(tmp_path / "p.json", profile)
    assert read_profile(tmp_path / "p.json") == profile


def test_synthetic_images_are_the_same_again_and_go_afterwards(tmp_path: Path) -> None:
    first, second = (list(make_images(tmp_path / name, 3, 7)) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert len({path.read_bytes() for path in first}) == 3
    measure_input(request("synthetic", samples=2, workers=(0,)), ALONE, CORES, tmp_path / "io", ())
    assert not (tmp_path / "io" / ".images").exists()
    measure_input(request("synthetic", samples=2, workers=(0,), keep=True), ALONE, CORES, tmp_path / "kept", ())
    assert len(find_images(tmp_path / "kept" / ".images")) == 2


def test_synthetic_images_are_as_large_as_imagenets(tmp_path: Path) -> None:
    paths = list(make_images(tmp_path, 24, 0))
    pixels = [image.width * image.height for image in map(decode, map(read_file, paths))]
    per_pixel = sum(path.stat().st_size for path in paths) / sum(pixels)
    assert 120_000 < np.median(pixels) < 260_000
    assert 0.4 < per_pixel < 0.8


def test_undecodable_input_is_reported_even_if_nothing_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    with pytest.raises(UserError, match="none of 1 files can be decoded"):
        measure_input(request(str(tmp_path)), ALONE, CORES, tmp_path / "io", ())
    with pytest.raises(UserError, match="holds no image"):
        find_images(tmp_path / "io")
    with pytest.raises(UserError, match="is not a folder; give a folder of images"):
        find_images(tmp_path / "absent")


def test_a_cold_pass_reports_whether_it_was_cold(tmp_path: Path) -> None:
    images = small_images(tmp_path, 3)
    seen = {drop_from_cache(path) for path in images}
    timed = time_files(images, cold=True, crop=8, seed=0)
    assert timed.condition in ("cold", "not dropped", "not known")
    assert timed.condition == "cold" or seen != {"cold"}
    assert time_files(images, cold=False, crop=8, seed=0).condition == "warm"


def test_samples_are_normalised_crops(tmp_path: Path) -> None:
    image = Image.fromarray(np.full((50, 80, 3), 128, np.uint8))
    tensor = transform(image, 24, random.Random(1))
    assert tensor.shape == (3, 24, 24)
    for channel, (mean, sd) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        assert torch.allclose(tensor[channel], torch.tensor((128 / 255 - mean) / sd))
    narrow = transform(Image.fromarray(np.zeros((300, 2, 3), np.uint8)), 8, random.Random(0))
    assert narrow.shape == (3, 8, 8)


def test_mini_batches_have_the_samples_of_their_numbers(tmp_path: Path) -> None:
    images = small_images(tmp_path / "images", 3)
    labels = labels_of(images, 4, tmp_path)
    batches = ImageBatches(images, 8, 5, labels)
    read = batches[range(2, 6)]
    assert isinstance(read, ReadBatch)
    alone = [transform(decode(read_file(images[n % 3])), 8, random.Random(5_000_015 + n)) for n in range(2, 6)]
    assert torch.equal(read.inputs, torch.stack(alone))
    # Another round has another crop of the same file.
    assert not torch.equal(read.inputs[0], read.inputs[3])
    assert read.labels.tolist() == [labels[2], labels[0], labels[1], labels[2]]
    assert read.times.worker == -1
    assert min(read.times[1:]) > 0
    images[1].write_bytes(b"no image")
    broken = batches[[0, 1]]
    assert isinstance(broken, Unreadable)
    assert broken.path == str(images[1])


def test_labels_are_the_folders_by_name(tmp_path: Path) -> None:
    images = [tmp_path / name for name in ("b/1.png", "a/2.png", "c/3.png", "a/4.png")]
    assert labels_of(images, 3, tmp_path) == [1, 0, 2, 0]
    with pytest.raises(UserError, match="images in 3 folders, and targets of this model have 2 classes"):
        labels_of(images, 2, tmp_path)


def drawn(mean_s: float, blocks: int, count: int, seed: int) -> list[tuple[float, ...]]:
    """Skewed samples with a known mean, as unlike files give, with 2% of drift between blocks."""
    generator = np.random.default_rng(seed)
    factors = generator.normal(1, 0.02, blocks)
    return [tuple((mean_s * f * generator.gamma(4, 0.25, count)).tolist()) for f in factors]


def test_known_parts_and_copies_are_recovered() -> None:
    parts = {"read_s": 1e-3, "decode_s": 4e-3, "transform_s": 5e-3}
    columns = {label: drawn(mean, 8, 300, seed) for seed, (label, mean) in enumerate(parts.items())}
    ones = (1,) * 300
    files = [
        FileSamples(
            block=block,
            condition="cold",
            bytes=ones,
            pixels=ones,
            **{label: values[block] for label, values in columns.items()},  # type: ignore[arg-type]
        )
        for block in range(8)
    ]
    generator = np.random.default_rng(3)
    alpha, beta = 12e-6, 1 / 12e9
    batches = [
        BatchSamples(
            block=block,
            stage="copy",
            batch=0,
            bytes=size,
            how="pinned",
            samples_s=tuple(((alpha + beta * size) * generator.normal(1, 0.02, 10)).tolist()),
        )
        for block in range(8)
        for size in (4096, 65536, 1 << 20, 1 << 24, 1 << 26)
    ]
    loader = [
        LoaderSamples(block=block, workers=2, batch=4, start="fork", first_s=1.0, gaps_s=(0.0, 0.08) * 3)
        for block in range(8)
    ]
    (side,) = fit_input({"x": InputRecords(files, batches, loader, [UnreadableFile(path="a", why="b")])})
    assert side.read_warm is None
    for part, mean in zip((side.read_cold, side.decode, side.transform), parts.values(), strict=True):
        assert part is not None
        assert part.mean_s == pytest.approx(mean, rel=0.03)
        assert 0.005 < part.relative_sd < 0.06
    (copy,) = side.copies
    assert copy.alpha_s == pytest.approx(alpha, rel=0.05)
    assert copy.beta_s_per_byte == pytest.approx(beta, rel=0.02)
    # Two workers deliver two batches of four at once every 80 ms.
    assert side.loader[0].sample_s == pytest.approx(0.08 / 8)
    moved = h2d_seconds(side, 1e8)
    assert moved is not None
    assert moved.seconds == pytest.approx(alpha + beta * 1e8, rel=0.03)
    assert moved.extrapolated


def part(mean_s: float) -> PartTime:
    return PartTime(mean_s=mean_s, relative_sd=0.1, iqr_s=0.0, samples=10)


def rates(**by_workers: float) -> tuple[LoaderRate, ...]:
    return tuple(
        LoaderRate(workers=int(name[1:]), batch=8, sample_s=value, relative_sd=0.05)
        for name, value in by_workers.items()
    )


def test_reading_a_batch_follows_workers_and_the_disk() -> None:
    side = InputSide(source="x", read_cold=part(3e-3), read_warm=part(1e-3), decode=part(4e-3), transform=part(5e-3))
    in_parts = io_seconds(side, 64, None, cold=True)
    assert in_parts is not None
    assert in_parts.seconds == pytest.approx(64 * 12e-3)
    loaded = msgspec.structs.replace(side, loader=rates(w0=10e-3, w2=5e-3))
    warm, cold, more, fewer = (
        io_seconds(loaded, 64, workers, cold=from_disk)
        for workers, from_disk in ((None, False), (2, True), (16, False), (1, False))
    )
    assert warm is not None
    assert (warm.seconds, warm.extrapolated) == (pytest.approx(64 * 5e-3), False)
    assert cold is not None
    assert cold.seconds == pytest.approx(64 * (5e-3 + 2e-3 / 2))
    assert more is not None
    assert (more.seconds, more.extrapolated) == (pytest.approx(64 * 5e-3), True)
    assert fewer is not None
    assert (fewer.seconds, fewer.extrapolated) == (pytest.approx(64 * 10e-3), True)
    assert io_seconds(InputSide(source="x"), 64, None, cold=False) is None


def test_input_read_ahead_uses_measured_workers_if_any() -> None:
    both, alone = (
        InputSide(source="x", loader=rates(w0=4e-3, w2=5e-3, w4=6e-3)),
        InputSide(source="x", loader=rates(w0=4e-3)),
    )
    found = [
        io_seconds(side, 10, workers, cold=False, ahead=ahead)
        for side, workers, ahead in ((both, None, True), (both, None, False), (alone, None, True), (alone, 2, True))
    ]
    assert [(time.seconds, time.in_process) for time in found if time] == [
        (pytest.approx(0.05), False),
        (pytest.approx(0.04), True),
        (pytest.approx(0.04), True),
        (pytest.approx(0.04), False),
    ]
    assert found[0]
    assert found[0].words == "a loader with 2 workers, the fastest measured that reads ahead"


def test_a_traces_input_is_taken_as_it_is() -> None:
    side = InputSide(source="m", model="m", batches=(BatchInput(batch=32, median_s=0.02, relative_sd=0.1, samples=5),))
    same, twice = (io_seconds(side, samples, None, cold=True) for samples in (32, 64))
    assert same is not None
    assert (same.seconds, same.extrapolated) == (0.02, False)
    assert twice is not None
    assert (twice.seconds, twice.extrapolated) == (0.04, True)


def test_a_cpu_copies_to_no_device() -> None:
    copy = HostCopy(how="memcpy", alpha_s=1e-6, beta_s_per_byte=1e-10, relative_sd=0.1, bytes_range=(1, 10))
    none = h2d_seconds(InputSide(source="x", copies=(copy,)), 1e6)
    assert none is not None
    assert none.seconds == 0
    assert h2d_seconds(InputSide(source="x"), 1e6) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synthetic", "--workers", "two", "-o", "x"], "--workers two: give whole numbers"),
        (["synthetic", "--batch", "0", "-o", "x"], "--batch"),
    ],
)
def test_mistakes_are_told_before_anything_runs(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(COMMAND, arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
