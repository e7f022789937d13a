"""Variables of TokenSpeed's encode worker: which are read as our settings, and why the rest are not."""

REFERENCE_VARIABLES = {
    "TOKENSPEED_EPD_ENCODE_EMBED_CACHE_MB": "store_device_mib",
    "TOKENSPEED_EPD_ENCODE_EMBED_CACHE_DRAM_MB": "store_host_mib",
    "TOKENSPEED_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "park_seconds",
    "TOKENSPEED_MM_ENABLE_ENCODER_CUDA_GRAPH": "encoder_cuda_graphs",
}
"""Variables of TokenSpeed's encode worker that mean the same as one of our settings."""

TRUTH = ("false", "true")
WORDS_OF_TRUTH = {"0": "false", "1": "true", "false": "false", "true": "true"}
"""What variables of this kind hold elsewhere, in any case."""

REFERENCE_WITHOUT_MEANING = {
    "TOKENSPEED_EPD_ENCODE_RING_SLOTS": "there is no ring of slots; the store is sized by store_device_mib",
    "TOKENSPEED_EPD_ENCODE_RING_SLOT_MB": "there is no ring of slots; the store is sized by store_device_mib",
    "TOKENSPEED_DISAGGREGATION_QUEUE_SIZE": "the number of sender lanes is fixed",
    "TOKENSPEED_DISAGGREGATION_THREAD_POOL_SIZE": "the number of sender lanes is fixed",
    "TOKENSPEED_GRPC_MAX_MESSAGE_BYTES": "the longest message is 256 MiB, or a third of max_pixel_mib",
    "TOKENSPEED_SKIP_GRPC_WARMUP": "a worker is ready once its tower is warm",
    "TOKENSPEED_MM_SKIP_COMPUTE_HASH": "contents are always hashed: rows are found again by that",
    "TOKENSPEED_LOG_MM_TIMING": "times are in the metrics",
    "TOKENSPEED_USE_PICKLE_IPC": "nothing is ever pickled",
    "EPD_PIXEL_SHM": "pixels go to the encode loop over a socket without copies",
    "SMG_MM_PIXEL_RDMA": "pixels are taken inline or through shared memory; leave it off in the gateway",
}
