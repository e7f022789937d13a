"""The EncodePool resource: its fields (one table), typed values, parser, names and labels."""
