"""A server for one machine that speaks OpenAI's protocol; docs/serving.md."""
