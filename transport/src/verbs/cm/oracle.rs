//! Compares our types and constants of librdmacm with those of `rdma-sys`, as
//! [`verbs::oracle`](crate::verbs::oracle) does for libibverbs.

use std::mem::{align_of, offset_of, size_of};

use super::sys;

macro_rules! same {
    ($($name:ident { $($field:ident)* })*) => {
        $({
            let (ours, theirs) = (size_of::<sys::$name>(), size_of::<rdma_sys::$name>());
            assert_eq!(ours, theirs, "bytes of {}", stringify!($name));
            let (ours, theirs) = (align_of::<sys::$name>(), align_of::<rdma_sys::$name>());
            assert_eq!(ours, theirs, "alignment of {}", stringify!($name));
            $(let (ours, theirs) = (offset_of!(sys::$name, $field), offset_of!(rdma_sys::$name, $field));
            assert_eq!(ours, theirs, "place of {}.{}", stringify!($name), stringify!($field));)*
        })*
    };
}

#[test]
fn types_and_constants_of_librdmacm_are_those_of_this_systems_headers() {
    same! {
        rdma_event_channel { fd }
        rdma_conn_param {
            private_data private_data_len responder_resources initiator_depth flow_control retry_count rnr_retry_count srq
            qp_num
        }
        rdma_ud_param { private_data private_data_len ah_attr qp_num qkey }
        rdma_cm_event { id listen_id event status param }
    }
    use rdma_sys::{rdma_cm_event_type as event, rdma_port_space as space};
    macro_rules! values {
        ($module:ident: $($constant:ident)*) => {
            $(assert_eq!(sys::$constant, $module::$constant, stringify!($constant));)*
        };
    }
    values! { event:
        RDMA_CM_EVENT_ADDR_RESOLVED RDMA_CM_EVENT_ADDR_ERROR RDMA_CM_EVENT_ROUTE_RESOLVED RDMA_CM_EVENT_ROUTE_ERROR
        RDMA_CM_EVENT_CONNECT_REQUEST RDMA_CM_EVENT_CONNECT_RESPONSE RDMA_CM_EVENT_CONNECT_ERROR
        RDMA_CM_EVENT_UNREACHABLE RDMA_CM_EVENT_REJECTED RDMA_CM_EVENT_ESTABLISHED RDMA_CM_EVENT_DISCONNECTED
        RDMA_CM_EVENT_DEVICE_REMOVAL RDMA_CM_EVENT_ADDR_CHANGE RDMA_CM_EVENT_TIMEWAIT_EXIT
    }
    values! { space: RDMA_PS_TCP RDMA_PS_UDP RDMA_PS_IB }
}
