"""What a switch took and held: spans, memory, counts, and their reduction over ranks."""
