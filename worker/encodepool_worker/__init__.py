"""Vision-encode workers for EPD serving: gRPC in, vision tower, embeddings out over Mooncake."""
