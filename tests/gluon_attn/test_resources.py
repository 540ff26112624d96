"""What is read from the machine code of a kernel."""

from gluon_attn.resources import instructions, steady_loops


def test_a_serialised_loop_is_seen():
    listing = """
    .L_x_1:
        /*0000*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], R24, gsb0 ;
        /*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0020*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24, gsb0 ;
        /*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/ MUFU.EX2 R3, R3 ;
        /*0050*/ STL [R1], R3 ;
        /*0060*/ @P1 BRA `(.L_x_1) ;
        /*0070*/ BRA `(.L_x_1) ;
    """
    (loop,) = steady_loops(*instructions(listing))
    assert (loop.products, loop.waits, loop.spills, loop.exp2, loop.early_exp2) == (2, 2, 1, 1, 0)
