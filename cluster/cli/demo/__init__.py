"""`tandem demo`: serves a small model and shows its answers, or kills its processes meanwhile."""
