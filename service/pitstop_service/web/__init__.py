"""What all endpoints share: problem documents, strict JSON, the body limit, the OpenAPI document."""
