use proptest::prelude::*;

use super::*;
use crate::topology::preset;

const GB_PER_S: u64 = 1_000_000_000;

/// The matrix of a DGX-1V as a terminal shows it, with the header underlined.
const DGX_1V: &str = "\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tmlx5_1\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\tSYS\t0-19,40-59\t0
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\tSYS\t0-19,40-59\t0
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\tSYS\t0-19,40-59\t0
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\tSYS\t0-19,40-59\t0
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\tPIX\t20-39,60-79\t1
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\tPIX\t20-39,60-79\t1
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\tPHB\t20-39,60-79\t1
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\tPHB\t20-39,60-79\t1
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \tSYS\t\t
mlx5_1\tSYS\tSYS\tSYS\tSYS\tPIX\tPIX\tPHB\tPHB\tSYS\t X \t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
";

/// `gpus` GPUs; each pair has the same cell.
fn uniform(gpus: usize, cell: &str) -> String {
    let names: Vec<String> = (0..gpus).map(|gpu| format!("GPU{gpu}")).collect();
    let cells = |row: usize| {
        (0..gpus).map(|column| if row == column { " X " } else { cell }).collect::<Vec<_>>().join("\t")
    };
    let rows: String = (0..gpus).map(|row| format!("GPU{row}\t{}\t0-47\t0\t\tN/A\n", cells(row))).collect();
    format!("\t{}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n{rows}", names.join("\t"))
}

fn refused(text: &str) -> String {
    parse(text, NVLINK_BYTES_PER_S).unwrap_err().to_string()
}

#[test]
fn a_matrix_of_dgx_1v_has_the_links_of_the_preset() {
    assert!(is_matrix(DGX_1V) && !is_matrix("[[node]]\n"));
    let (read, known) = (parse(DGX_1V, NVLINK_BYTES_PER_S).unwrap(), preset("dgx-1v").unwrap());
    assert_eq!((read.links(), read.nodes()), (known.links(), known.nodes()));
}

#[test]
fn what_a_link_carries_is_a_parameter() {
    let topology = parse(&uniform(2, "NV4"), 14 * GB_PER_S).unwrap();
    let link = topology.link(NodeId(0), NodeId(1)).unwrap();
    assert_eq!((link.bytes_per_s, link.count), (56 * GB_PER_S, 4));
}

#[test]
fn more_links_than_a_gpu_has_are_those_to_a_switch() {
    let known = preset("dgx-h100").unwrap();
    assert_eq!(parse(&uniform(8, "NV18"), NVLINK_BYTES_PER_S).unwrap().links(), known.links());
    let direct = parse(&uniform(4, "NV4"), NVLINK_BYTES_PER_S).unwrap();
    assert_eq!((direct.nodes().len(), direct.links().len()), (4, 12));
}

#[test]
fn a_gpu_that_lost_links_to_its_switch_has_fewer_of_them() {
    let degraded = uniform(4, "NV18").replace("GPU0\t X \tNV18\tNV18\tNV18", "GPU0\t X \tNV16\tNV16\tNV16");
    let degraded = ["GPU1", "GPU2", "GPU3"]
        .iter()
        .fold(degraded, |text, gpu| text.replace(&format!("\n{gpu}\tNV18"), &format!("\n{gpu}\tNV16")));
    let topology = parse(&degraded, NVLINK_BYTES_PER_S).unwrap();
    let carried: Vec<u64> =
        (0..4).map(|rank| topology.leaving(topology.node(rank))[0].bytes_per_s / GB_PER_S).collect();
    assert_eq!(carried, [400, 450, 450, 450]);
}

#[test]
fn faults_name_line_and_column() {
    assert!(refused("mlx5_0\n").starts_with("1:1: there is no line with the columns"));
    assert!(refused(&uniform(3, "PIX")).starts_with("2:1: no two GPUs are joined by NVLink"));
    assert_eq!(
        refused(&uniform(2, "NVX")),
        "2:10: 'NVX' is none of X, NV and a number, PIX, PXB, PHB, NODE, SYS"
    );
    assert_eq!(
        refused(&uniform(2, "NV99")),
        "2:10: 'NV99' is none of X, NV and a number, PIX, PXB, PHB, NODE, SYS"
    );
    assert_eq!(
        refused(&uniform(2, "X")),
        "2:10: 'X' is none of X, NV and a number, PIX, PXB, PHB, NODE, SYS"
    );
    let three = uniform(3, "NV2");
    let cut = three.lines().take(3).collect::<Vec<_>>().join("\n");
    assert_eq!(refused(&cut), "1:1: there is no row of GPU2, which has a column");
    let short = "\tGPU0\tGPU1\nGPU0\t X\tNV1\nGPU1\tNV1\n";
    assert_eq!(refused(short), "3:1: the row of GPU1 ends before the column of GPU1");
    let asymmetric = "\tGPU0\tGPU1\nGPU0\t X\tNV1\nGPU1\tNV2\tX\n";
    assert_eq!(refused(asymmetric), "2:1: GPU0 has NV1 to GPU1, which has NV2 to GPU0");
    let apart = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV1\tSYS\nGPU1\tNV1\tX\tSYS\nGPU2\tSYS\tSYS\tX\n";
    assert!(refused(apart).starts_with("4:1: disconnected: {gpu0, gpu1}, {gpu2} do not reach each other"));
    let much = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV18\tNV18\nGPU1\tNV18\tX\tSYS\nGPU2\tNV18\tSYS\tX\n";
    assert!(refused(much).starts_with("2:1: GPU0 has 36 NVLinks, more than 18"));
}

proptest! {
    #[test]
    fn no_text_panics(text in "(\x1b\\[4?m?|\tGPU0\tGPU1\n|GPU[01]|\t|\n| X |NV[0-9]{1,3}|SYS|.{0,3}){0,24}") {
        let _ = parse(&text, u64::MAX);
    }
}
