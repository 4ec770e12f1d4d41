"""KV accounting: layout, block pool, ledger (no torch), and the arena tensor. Blocks are opaque outside this
package."""
