"""Storage in tiers: saliency, or the order of arrival, decides a token's tier and slot."""
