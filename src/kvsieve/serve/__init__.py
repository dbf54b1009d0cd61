"""OpenAI-compatible server for one machine; docs/serving.md."""
