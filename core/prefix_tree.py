"""What a prefix is called: a tree whose nodes stand for whole blocks of tokens, one after another from a root.

    root (model, adapter, salt) --(t0..t15)--> node 1 --(t16..t31)--> node 2 ...

Cached blocks hang at nodes (`blocks.py`): one per cache group at most. A node says nothing about which of them are
there, so the blocks of a window can be found although those before them are gone.

Invariants
* A node is found by (parent, its token ids). Node ids are never reused and a dict compares the ids themselves, so a
  hit is exact: no hash can collide into another request's KV.
* A node lives exactly as long as someone uses it: a block that hangs at it, a child, or the table of a sequence.
* Roots are any other keys than ints; they are never kept.
"""

from __future__ import annotations

Tokens = tuple[int, ...]
Key = tuple[object, Tokens]


class PrefixTree:
    """Nodes by (parent, tokens), counted by their users."""

    def __init__(self) -> None:
        self.ids: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}
        self.uses: dict[int, int] = {}
        self.next_id = 1

    def find(self, parent: object, tokens: Tokens) -> int | None:
        return self.ids.get((parent, tokens))

    def enter(self, parent: object, tokens: Tokens) -> int:
        """The node of `tokens` after `parent`, made if need be; the caller must `use` it before anyone lets go."""
        key = (parent, tokens)
        node = self.ids.get(key)
        if node is None:
            node = self.ids[key] = self.next_id
            self.next_id += 1
            self.keys[node] = key
            self.uses[node] = 0
            self.use(parent)
        return node

    def use(self, node: object) -> None:
        if isinstance(node, int):
            self.uses[node] += 1

    def leave(self, node: object) -> None:
        """One user less; a node without users goes, and with it its use of its parent."""
        while isinstance(node, int):
            self.uses[node] -= 1
            if self.uses[node]:
                return
            key = self.keys.pop(node)
            del self.ids[key], self.uses[node]
            node = key[0]

    def above(self, node: object, levels: int) -> object:
        """The node `levels` blocks before `node`."""
        for _ in range(levels):
            assert isinstance(node, int)
            node = self.keys[node][0]
        return node

    def audit(self, users: list[object]) -> list[str]:
        """Violated invariants, given the node of every block and table (roots and None are left out)."""
        count = dict.fromkeys(self.keys, 0)
        wrong = []
        for node in (*users, *(parent for parent, _ in self.keys.values())):
            if isinstance(node, int):
                if node not in count:
                    wrong.append(f"node {node} is used but gone")
                    continue
                count[node] += 1
        if count != self.uses:
            bad = [(n, c, self.uses.get(n)) for n, c in count.items() if c != self.uses.get(n)]
            wrong.append(f"uses of prefix nodes differ (node, counted, kept): {bad[:4]}")
        if 0 in count.values():
            wrong.append("a prefix node without users is kept")
        if self.ids != {key: node for node, key in self.keys.items()}:
            wrong.append("prefix nodes are not found where they are")
        return wrong
