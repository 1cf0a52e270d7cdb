"""A language model as a policy: loading and vetting, sampling, decoding, scoring, critics."""
