"""PTX that turns a word of eight nibbles into eight BF16 weights, two at a time."""


def unpack_asm(setup: list[str], arithmetic: list[str]) -> str:
    """Word $8 -> its eight BF16 weights in $0..$7.

    A nibble in each half of a register ``t`` gets the exponent with which it reads 128 + nibble; ``arithmetic`` then subtracts 136
    and multiplies by the scale, with what ``setup`` has declared.
    """
    lines = list(setup)
    for j in range(4):  # nibbles j and j + 4 are 16 bits apart
        source = "$8"
        if j:
            lines.append(f"shr.u32 t, $8, {4 * j};")
            source = "t"
        lines.append(f"lop3.b32 t, {source}, 0x000f000f, 0x43004300, 0xEA;")  # (source & mask) | exponent
        lines += arithmetic
        lines.append(f"mov.b32 {{${j}, ${j + 4}}}, t;")
    return "\n".join(lines) + "}"
