"""`tandem watermark`: the key of watermarks, and the test of texts."""
