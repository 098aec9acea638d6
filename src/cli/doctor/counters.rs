//! What went wrong on RDMA links since their drivers were loaded, and what keeps packets from being
//! lost.

use std::path::Path;

use pleach::transport::verbs::port::Port;

use super::Machine;
use super::rdma::{is_software, name_of};
use super::{Finding, Section};

/// Counters of broken symbols and packets: a cable, a connector, a transceiver.
const BROKEN: [&str; 6] = [
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "rx_icrc_encapsulated",
];

/// Counters of packets that had to be sent again: a network that loses some. Of mlx5, of bnxt and
/// irdma, of rxe.
const LOST: [&str; 13] = [
    "port_xmit_discards",
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "implied_nak_seq_err",
    "roce_adp_retrans_to",
    "to_retransmits",
    "seq_err_naks_rcvd",
    "res_oos_drop_count",
    "out_of_seq_request",
    "rcvd_seq_err",
    "retry_exceeded_err",
    "completer_retry_err",
];

/// Counters of receivers that were not ready.
const NOT_READY: [&str; 4] = ["rnr_nak_retry_err", "rcvd_rnr_err", "rnr_naks_rcvd", "retry_rnr_exceeded_err"];

/// Counters of congestion that was told in time: the network does what it should.
const MARKED: [&str; 3] = ["np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled"];

/// A queue of this many packets, or a longer one, lost none of several reads by software RDMA.
const BACKLOG_PACKETS_MIN: u64 = 10_000;

/// One retransmission in this number of packets is not reported.
const PACKETS_A_LOSS: u64 = 1_000_000;

/// Errors of links, lost packets, and congestion control.
pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let mut section = Section::new("RDMA links");
    for port in machine.rdma_ports().unwrap_or_default() {
        counters(machine, port, &mut section);
        if port.is_active {
            congestion(machine, port, &mut section);
        }
    }
    section.done()
}

/// The counters of these names that are not zero, and whether any of them is there.
fn counted(machine: &Machine, port: &Port, names: &[&'static str]) -> (Vec<(&'static str, u64)>, bool) {
    let folder = format!("sys/class/infiniband/{}/ports/{}", port.device, port.number);
    let of_device = format!("sys/class/infiniband/{}", port.device);
    let read = |name: &str| {
        let places = [
            format!("{folder}/counters/{name}"),
            format!("{folder}/hw_counters/{name}"),
            format!("{of_device}/hw_counters/{name}"),
        ];
        places.iter().find_map(|path| machine.number(path))
    };
    let there: Vec<_> = names.iter().filter_map(|name| Some((*name, read(name)?))).collect();
    let is_there = !there.is_empty();
    (there.into_iter().filter(|(_, count)| *count > 0).collect(), is_there)
}

fn shown(counts: &[(&str, u64)]) -> String {
    counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
}

fn counters(machine: &Machine, port: &Port, section: &mut Section) {
    let name = name_of(port);
    let look = format!("rdma statistic show link {}/{}   # twice: do they grow?", port.device, port.number);
    let (broken, knows_broken) = counted(machine, port, &BROKEN);
    let (lost, knows_lost) = counted(machine, port, &LOST);
    let (not_ready, _) = counted(machine, port, &NOT_READY);
    let subject = format!("{name} errors");
    if !knows_broken && !knows_lost {
        return section.unknown(subject, "its driver counts none", &look);
    }
    let (packets, _) = counted(machine, port, &["port_xmit_packets", "sent_pkts"]);
    let packets = packets.iter().map(|(_, count)| *count).max();
    let losses: u64 = lost.iter().map(|(_, count)| *count).sum();
    if !broken.is_empty() {
        let text = format!("{}: look at cable and transceiver", shown(&broken));
        section.warning(subject.clone(), text, look.clone());
    }
    if losses > packets.unwrap_or(0) / PACKETS_A_LOSS {
        let text = format!("packets were lost ({}): is the network lossless from end to end?", shown(&lost));
        let command = match &port.interface {
            Some(interface) if !is_software(machine, port) => {
                format!(
                    "sudo mlnx_qos -i {interface} --trust dscp --pfc 0,0,0,1,0,0,0,0   # and the same on the switches"
                )
            }
            _ => look.clone(),
        };
        section.warning(format!("{name} losses"), text, command);
    }
    if !not_ready.is_empty() {
        let text = format!("receivers were not ready ({}), which pleach never causes", shown(&not_ready));
        section.warning(format!("{name} receivers"), text, look);
    }
    if broken.is_empty() && losses <= packets.unwrap_or(0) / PACKETS_A_LOSS {
        let text = if losses == 0 { "none".to_owned() } else { format!("few: {}", shown(&lost)) };
        section.ok(subject, text);
    }
}

/// The queue of received packets of a device made of software: docs/hardware.md says what
/// Soft-RoCE of Linux 6.1 does after lost packets.
fn backlog(machine: &Machine, port: &Port, section: &mut Section) {
    let subject = format!("{} queue", name_of(port));
    match machine.number("proc/sys/net/core/netdev_max_backlog") {
        // Network namespaces do not show it.
        None => {}
        Some(packets) if packets < BACKLOG_PACKETS_MIN => section.warning(
            subject,
            format!(
                "{packets} packets: more of them are lost, after which Soft-RoCE may break a connection, and call a transfer done whose bytes have not arrived"
            ),
            "sudo sysctl -w net.core.netdev_max_backlog=100000",
        ),
        Some(packets) => section.ok(subject, format!("{packets} packets")),
    }
}

/// ECN and PFC of a RoCE port.
fn congestion(machine: &Machine, port: &Port, section: &mut Section) {
    let subject = format!("{} PFC and ECN", name_of(port));
    if is_software(machine, port) {
        backlog(machine, port, section);
        return section.ok(subject, "not needed: a device made of software");
    }
    let Some(interface) = &port.interface else {
        return section.ok(subject, "not needed: InfiniBand has credits");
    };
    let folder = Path::new("sys/class/net").join(interface).join("ecn");
    // Reaction point: slows down when told; notification point: tells.
    let enabled = |side: &str| -> Option<Vec<String>> {
        let folder = folder.join(side).join("enable");
        let folder = folder.to_str()?;
        let names = machine.names(folder);
        (!names.is_empty()).then(|| {
            names
                .into_iter()
                .filter(|name| machine.text(&format!("{folder}/{name}")).as_deref() == Some("1"))
                .collect()
        })
    };
    let (marked, _) = counted(machine, port, &MARKED);
    let seen = if marked.is_empty() { String::new() } else { format!("; {}", shown(&marked)) };
    let look = format!("dcb pfc show dev {interface}; mlnx_qos -i {interface}");
    match (enabled("roce_np"), enabled("roce_rp")) {
        (Some(tells), Some(slows)) if tells.is_empty() || slows.is_empty() => section.warning(
            subject,
            format!("ECN is off: senders are not told of congestion before packets are lost{seen}"),
            format!("for side in np rp; do echo 1 | sudo tee /sys/class/net/{interface}/ecn/roce_$side/enable/3; done"),
        ),
        (Some(tells), Some(_)) => {
            section.ok(format!("{} ECN", name_of(port)), format!("on for priorities {}{seen}", tells.join(" ")));
            section.unknown(format!("{} PFC", name_of(port)), "no file says which priorities have it", &look);
        }
        _ => section.unknown(subject, format!("no file says whether they are on{seen}"), &look),
    }
}
