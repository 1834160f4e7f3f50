"""Storage by importance: a token lies in the tier that its saliency gave it, in any order."""
