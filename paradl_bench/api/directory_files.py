"""Which records the JSON-lines files of a measurement directory hold."""

from __future__ import annotations

import msgspec

from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.records import input_record, measurement, roofline_record, samples
from paradl_bench.records.contexts.context import CONTEXTS_FILE, ContextSamples
from paradl_bench.records.hosts import host_load, host_record
from paradl_bench.records.training import compile_record, training_record

RECORDS: dict[str, type[msgspec.Struct]] = {
    measurement.LAYERS_FILE: samples.LayerSamples,
    measurement.COLLECTIVES_FILE: samples.CollectiveSamples,
    training_record.TRAINING_FILE: training_record.TrainingIterations,
    KERNELS_FILE: KernelSamples,
    roofline_record.RATES_FILE: roofline_record.RateSamples,
    measurement.ITERATIONS_FILE: samples.IterationSamples,
    measurement.COPIES_FILE: samples.CopySamples,
    CONTEXTS_FILE: ContextSamples,
    input_record.BATCHES_FILE: input_record.BatchSamples,
    input_record.FILES_FILE: input_record.FileSamples,
    input_record.LOADER_FILE: input_record.LoaderSamples,
    input_record.UNREADABLE_FILE: input_record.UnreadableFile,
    measurement.TRACE_FILE: samples.TraceTimes,
    measurement.DROPPED_FILE: measurement.DroppedRow,
    compile_record.COMPILED_FILE: compile_record.CompileRecord,
    host_record.HOSTS_FILE: host_record.RankHost,
    host_load.LOAD_FILE: host_load.HostLoad,
}
"""By the file's name; what a directory was measured for comes first."""
