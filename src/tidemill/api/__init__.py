"""The nouns users write: kinds, ConfigMaps, labels. Typed, defaulted, validated. No I/O."""
