from trees_of_modules import language_model

from smp_runtime.partitioning import partition


def test_the_table_goes_down_to_what_is_on_one_rank():
    assert partition(language_model(2, head=0.1), 2, tied="copy").table() == (
        "module                    parameters  bytes    cost\n"
        "main: 0-1                        105  420 B  100.0%\n"
        "main/transformer: 0-1            105  420 B   95.6%\n"
        "main/lm_head: 1                  100  400 B    4.4%\n"
        "main/transformer/wte: 0          100  400 B    4.4%\n"
        "main/transformer/h: 0-1            4   16 B   88.9%\n"
        "main/transformer/ln_f: 1           1    4 B    2.2%\n"
        "main/transformer/h/0: 0            2    8 B   44.4%\n"
        "main/transformer/h/1: 1            2    8 B   44.4%\n"
        "shared parameter transformer.wte.weight: copies on 0-1, gradients summed\n"
        "partition 0: 102 parameters, 102 require grads, 0 buffers; 48.9% of the compute; "
        "1.6 KiB = 408 B parameters + 408 B gradients + 816 B optimizer + 0 B activations\n"
        "partition 1: 103 parameters, 103 require grads, 0 buffers; 51.1% of the compute; "
        "1.6 KiB = 412 B parameters + 412 B gradients + 824 B optimizer + 0 B activations\n"
        "stages on ranks 0 -> 1"
    )


def test_one_partition_is_one_line():
    lines = partition(language_model(2), 1).table().splitlines()
    assert lines[1].startswith("main: 0 ")
    assert lines[2].startswith("partition 0: ")
