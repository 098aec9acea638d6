use proptest::prelude::*;

use super::*;
use crate::topology::{NodeId, NodeKind, TopologyError, preset};

/// Four GPUs under two bridges of two CPUs, joined by NVLink in a ring with a double link, as NCCL
/// dumps it.
const DIRECT: &str = include_str!("tests/direct.xml");

/// Two hosts of two GPUs on NVSwitch with a NIC each.
const HOSTS: &str = include_str!("tests/hosts.xml");

/// The file that clouds give to NCCL in virtual machines: bridges and devices without GPU elements.
const BRIDGES: &str = include_str!("tests/bridges.xml");

const GB_PER_S: u64 = 1_000_000_000;

/// The bandwidth of the link from one node to another, by name, in bytes a second.
fn carried(topology: &Topology, from: &str, to: &str) -> Option<u64> {
    let node = |name: &str| {
        let number = topology.nodes().iter().position(|node| node.name == name);
        NodeId(number.unwrap_or_else(|| panic!("no {name}")) as u32)
    };
    topology.link(node(from), node(to)).map(|link| link.bytes_per_s)
}

fn switches(topology: &Topology) -> Vec<&str> {
    let switches = topology.nodes().iter().filter(|node| node.kind == NodeKind::Switch);
    switches.map(|node| node.name.as_str()).collect()
}

#[test]
fn gpus_are_ranks_and_nvlinks_are_counted() {
    let topology = parse(DIRECT).unwrap();
    let names: Vec<&str> = (0..4).map(|rank| topology.name(topology.node(rank))).collect();
    assert_eq!(names, ["gpu0", "gpu1", "gpu2", "gpu3"]);
    assert_eq!(carried(&topology, "gpu0", "gpu1"), Some(50 * GB_PER_S));
    assert_eq!(carried(&topology, "gpu1", "gpu2"), Some(25 * GB_PER_S));
    assert_eq!(carried(&topology, "gpu0", "gpu2"), None);
    assert!(topology.is_symmetric());
}

#[test]
fn bridges_and_cpus_are_switches_and_what_leads_nowhere_is_left_out() {
    let topology = parse(DIRECT).unwrap();
    assert_eq!(switches(&topology), ["cpu0", "pci 0000:05:00.0", "cpu1", "pci 0000:84:00.0"]);
    assert_eq!(carried(&topology, "gpu0", "pci 0000:05:00.0"), Some(15_753_846_153));
    assert_eq!(carried(&topology, "pci 0000:05:00.0", "cpu0"), Some(15_753_846_153));
    assert_eq!(carried(&topology, "cpu0", "cpu1"), Some(10 * GB_PER_S));
}

#[test]
fn hosts_are_joined_by_their_nics_and_share_no_bus() {
    let topology = parse(HOSTS).unwrap();
    assert_eq!((topology.ranks(), topology.name(topology.node(3))), (4, "host1.gpu1"));
    assert_eq!(carried(&topology, "host0.gpu0", "nvswitch"), Some(450 * GB_PER_S));
    assert_eq!(carried(&topology, "host1.pci 0000:19:00.0", "network"), Some(50 * GB_PER_S));
    assert_eq!(carried(&topology, "host0.cpu0", "host0.pci 0000:19:00.0"), Some(63_015_384_615));
}

#[test]
fn devices_of_a_display_class_are_ranks_where_there_are_no_gpu_elements() {
    let topology = parse(BRIDGES).unwrap();
    assert_eq!((topology.ranks(), topology.name(topology.node(2))), (4, "gpu2"));
    assert_eq!(carried(&topology, "gpu0", "pci ffff:ff:01.0"), Some(31_507_692_307));
    assert_eq!(carried(&topology, "cpu0", "cpu1"), Some(16 * GB_PER_S));
}

#[test]
fn a_link_to_a_gpu_that_the_job_does_not_have_is_none() {
    let from = DIRECT.find("<gpu dev=\"3\"").unwrap();
    let to = DIRECT.rfind("</gpu>").unwrap() + "</gpu>".len();
    let topology = parse(&format!("{}{}", &DIRECT[..from], &DIRECT[to..])).unwrap();
    assert_eq!(topology.ranks(), 3);
    let leaving = topology.leaving(topology.node(2)).len();
    assert_eq!(leaving, 2, "to gpu1 and to the bridge");
}

#[test]
fn the_same_bus_twice_is_two_bridges() {
    let text = DIRECT.replace("0000:84:00.0", "0000:05:00.0");
    assert_eq!(
        switches(&parse(&text).unwrap()),
        ["cpu0", "pci 0000:05:00.0", "cpu1", "pci 0000:05:00.0 (2)"]
    );
}

#[test]
fn nics_without_a_speed_are_taken_for_slow_and_absurd_ones_are_refused() {
    let slow = parse(&HOSTS.replace("speed=\"400000\"", "speed=\"-1\"")).unwrap();
    assert_eq!(carried(&slow, "network", "host0.pci 0000:19:00.0"), Some(1_250_000_000));
    let absurd = refused(&HOSTS.replacen("speed=\"400000\"", "speed=\"4e9\"", 1));
    assert!(absurd.ends_with("speed \"4e9\" is not a number of megabits a second"), "{absurd}");
}

#[test]
fn xgmi_counts_by_architecture() {
    let gpu = |dev: u32, bus: &str, target: &str| {
        format!(
            "<pci busid=\"{bus}\" class=\"0x120000\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"><gpu dev=\"{dev}\" sm=\"256\" gcn=\"gfx942\" rank=\"{dev}\">\
             <xgmi target=\"{target}\" count=\"1\" tclass=\"0x120000\"/></gpu></pci>"
        )
    };
    let (one, other) = ("0000:05:00.0", "0000:26:00.0");
    let gpus = gpu(0, one, other) + &gpu(1, other, "000000:05:00.0");
    let topology =
        parse(&format!("<system version=\"2\"><cpu numaid=\"0\" arch=\"x86_64\">{gpus}</cpu></system>"))
            .unwrap();
    assert_eq!(carried(&topology, "gpu1", "gpu0"), Some(64 * GB_PER_S));
}

fn refused(text: &str) -> String {
    let error = parse(text).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn what_is_no_topology_says_where() {
    assert_eq!(
        refused("<graphs version=\"1\"/>"),
        "1:1: no NCCL topology: its outermost element is <graphs> and not <system>"
    );
    assert!(
        refused("<system>\n<cpu></system>").starts_with("2:6: no XML: expected 'cpu' tag, not 'system'"),
        "{}",
        refused("<system>\n<cpu></system>")
    );
    assert!(refused("<!DOCTYPE a [<!ENTITY b \"c\">]><a/>").contains("no XML"));
    assert_eq!(
        refused("<system version=\"1\"/>"),
        "1:1: no GPU: there is neither a <gpu> nor a <pci> of class 0x03"
    );
    let many = format!("<system{}/>", " a=\"\"".repeat(2_000));
    assert_eq!(refused(&many), "1:2: no XML: more than 1024 attributes in one element");
}

/// The error of the direct topology with one text replaced.
fn changed(from: &str, to: &str) -> String {
    assert!(DIRECT.contains(from), "{from}");
    refused(&DIRECT.replacen(from, to, 1))
}

#[test]
fn faults_name_line_and_column() {
    let attribute = changed("count=\"2\"", "count=\"two\"");
    assert!(attribute.ends_with("count \"two\" is not a number of links from 1 to 1024"), "{attribute}");
    assert!(attribute.starts_with("6:"), "{attribute}");
    assert!(changed(" count=\"2\"", "").ends_with("<nvlink> has no count"));
    assert!(changed("sm=\"70\"", "sm=\"52\"").contains("sm \"52\" is not a compute capability with NVLink"));
    assert!(
        changed("tclass=\"0x030200\"", "tclass=\"0x010000\"")
            .contains("tclass \"0x010000\" is not the class of")
    );
    assert!(
        changed("link_speed=\"8.0 GT/s PCIe\"", "link_speed=\"fast\"")
            .contains("link_speed \"fast\" is not of the form")
    );
    assert!(
        changed("link_width=\"16\"", "link_width=\"-1\"")
            .contains("link_width \"-1\" is not a number of lanes")
    );
    assert!(
        changed("busid=\"0000:05:00.0\"", "busid=\"five\"")
            .contains("busid \"five\" is not hexadecimal digits")
    );
    assert!(changed("numaid=\"0\" ", "").starts_with("2:3: <cpu> has no numaid"));
    assert!(changed("dev=\"1\"", "dev=\"0\"").contains("there are two nodes 'gpu0'"));
    assert!(changed("numaid=\"1\"", "numaid=\"0\"").contains("there are two nodes 'cpu0'"));
    assert!(refused("<system><gpu dev=\"0\"/></system>").starts_with("1:9: <gpu> stands outside of <pci>"));
    let apart = HOSTS
        .replace("<net ", "<nets ")
        .replace("count=\"18\"", "count=\"17\" tclass=\"0x030000\"")
        .replace(" tclass=\"0x068000\"", "");
    assert!(
        refused(&apart).contains("disconnected: {host0.gpu0, host0.gpu1}, {host1.gpu0, host1.gpu1}"),
        "{}",
        refused(&apart)
    );
}

#[test]
fn deep_nesting_and_many_elements_end_in_an_answer() {
    let depth = 100_000;
    let bridge = |number: usize| format!("<pci busid=\"{number:x}\" class=\"0x060400\">");
    let opened: String = (0..depth).map(bridge).collect();
    let deep = format!("<system><cpu numaid=\"0\">{opened}{}</cpu></system>", "</pci>".repeat(depth));
    assert!(matches!(parse(&deep).unwrap_err().fault, TextFault::Nccl(NcclFault::NoGpus)));
    let many =
        format!("<system>{}</system>", "<cpu numaid=\"0\" host_hash=\"0\"/>".repeat(ELEMENTS_MAX as usize));
    assert!(refused(&many).contains("no XML: "));
    let gpu = "<pci busid=\"1\" class=\"0x03\"/>";
    let cpus: String = (0..1_000)
        .map(|cpu| format!("<cpu numaid=\"{cpu}\">{}</cpu>", gpu.replace('1', &format!("{cpu:x}"))))
        .collect();
    let error = parse(&format!("<system>{cpus}</system>")).unwrap_err();
    assert!(
        matches!(error.fault, TextFault::Topology(TopologyError::TooMany { what: "CPUs", .. })),
        "{error}"
    );
}

#[test]
fn a_dump_of_dgx_1v_without_pcie_has_the_links_of_the_preset() {
    let known = preset("dgx-1v").unwrap();
    let mut text = String::from("<system version=\"1\">\n<cpu numaid=\"0\" arch=\"x86_64\">\n");
    for rank in 0..8 {
        let links: String = (0..8)
            .filter_map(|other| Some((other, known.link(known.node(rank), known.node(other))?.count)))
            .map(|(other, count)| {
                format!("<nvlink target=\"0000:{other:02x}:00.0\" count=\"{count}\" tclass=\"0x030200\"/>")
            })
            .collect();
        text += &format!(
            "<pci busid=\"0000:{rank:02x}:00.0\" class=\"0x030200\" link_speed=\"\" link_width=\"0\"><gpu dev=\"{rank}\" sm=\"70\">{links}</gpu></pci>\n"
        );
    }
    let topology = parse(&(text + "</cpu></system>")).unwrap();
    for link in known.links() {
        let names = (known.name(link.from), known.name(link.to));
        assert_eq!(carried(&topology, names.0, names.1), Some(link.bytes_per_s), "{names:?}");
    }
}

proptest! {
    #[test]
    fn no_text_panics(text in "(<system>|<cpu numaid=\"[0-3]\">|<pci busid=\"[0-9a-g]{1,3}\" class=\"0x0[36]\">|<gpu dev=\"[0-3]\" sm=\"(70|x)\">|<nvlink target=\"[0-9]{1,20}\" count=\"[0-9]{1,5}\"/>|</[a-z]{3}>|</system>|.{0,4}){0,16}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_change_of_a_dump_panics(at in 0..3_000_usize, length in 0..40_usize, with in "[ -~]{0,8}") {
        let at = at.min(DIRECT.len());
        let end = (at + length).min(DIRECT.len());
        let _ = parse(&format!("{}{with}{}", &DIRECT[..at], &DIRECT[end..]));
    }
}
