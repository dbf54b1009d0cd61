"""OpenAI's Responses API: its bodies translated into chats, its replies and events, and stored responses."""
