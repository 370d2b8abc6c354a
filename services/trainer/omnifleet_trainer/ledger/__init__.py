"""The durable account of a run: which prompts are out, what came back, what was trained on, exactly once.

The room knows SQLite and the vocabulary. It must not import torch, nor know rewards' meaning, policies or services.
"""

from omnifleet_trainer.ledger.ledger import SqliteLedger
from omnifleet_trainer.ledger.port import Ledger, LedgerCounts, PromptLease, ReadyGroup, Rollback
from omnifleet_trainer.ledger.queries import LedgerReader

__all__ = ["Ledger", "LedgerCounts", "LedgerReader", "PromptLease", "ReadyGroup", "Rollback", "SqliteLedger"]
