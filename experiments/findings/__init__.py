"""The findings, one module each: a question, the measurement that answers it, and what the paper says."""
