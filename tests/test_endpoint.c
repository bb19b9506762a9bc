/*
 * One address in, six endpoints out; and addresses that could not be bound are refused early.
 */
#include "support.h"

#include "endpoint.h"

TestSuite (endpoint, .timeout = 60);

static gq_endpoints endpoints;

static void
expect_refused (const char *address)
{
    gq_error error = {""};
    cr_assert_eq (gq_endpoints_derive (&endpoints, address, &error), GQ_INVALID, "%s", address);
    cr_assert_not_null (strstr (error.text, "address"), "%s", error.text);
    cr_assert_eq (gq_endpoints_derive (&endpoints, address, NULL), GQ_INVALID);
}

static void
expect_control (const char *address)
{
    gq_error error = {""};
    cr_assert_eq (gq_endpoints_derive (&endpoints, address, &error), GQ_OK, "%s", error.text);
    cr_assert_str_eq (endpoints.control, address);
}

Test (endpoint, tcp_takes_the_five_ports_above)
{
    expect_control ("tcp://example.org:5600");
    cr_assert_str_eq (endpoints.gradients_in, "tcp://example.org:5601");
    cr_assert_str_eq (endpoints.gradients_out, "tcp://example.org:5602");
    cr_assert_str_eq (endpoints.weights_in, "tcp://example.org:5603");
    cr_assert_str_eq (endpoints.weights_out, "tcp://example.org:5604");
    cr_assert_str_eq (endpoints.acks_out, "tcp://example.org:5605");
}

Test (endpoint, ipc_takes_names_beside_the_path)
{
    expect_control ("ipc:///tmp/run/control");
    cr_assert_str_eq (endpoints.gradients_in, "ipc:///tmp/run/control.gradients-in");
    cr_assert_str_eq (endpoints.gradients_out, "ipc:///tmp/run/control.gradients-out");
    cr_assert_str_eq (endpoints.weights_in, "ipc:///tmp/run/control.weights-in");
    cr_assert_str_eq (endpoints.weights_out, "ipc:///tmp/run/control.weights-out");
    cr_assert_str_eq (endpoints.acks_out, "ipc:///tmp/run/control.acks-out");
}

Test (endpoint, hosts_of_every_kind_are_kept_as_they_are)
{
    expect_control ("tcp://*:1");
    expect_control ("tcp://127.0.0.1:5600");
    expect_control ("tcp://[::1]:5600");
    cr_assert_str_eq (endpoints.acks_out, "tcp://[::1]:5605");
    expect_control ("tcp://eth0:65530");
    cr_assert_str_eq (endpoints.acks_out, "tcp://eth0:65535");
}

Test (endpoint, addresses_that_cannot_be_are_refused)
{
    static const char *const bad[] = {"",
                                      "5600",
                                      "localhost:5600",
                                      "udp://h:5600",
                                      "inproc://x",
                                      "TCP://h:5600",
                                      "tcp:/h:5600",
                                      "tcp://",
                                      "tcp://h",
                                      "tcp://h:",
                                      "tcp://:5600",
                                      "tcp://h:0",
                                      "tcp://h:-1",
                                      "tcp://h:65531",
                                      "tcp://h:5600x",
                                      "tcp://h:0x10",
                                      "tcp://h:*",
                                      "tcp://h:99999999999999999999",
                                      "ipc://"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        expect_refused (bad[i]);
}

Test (endpoint, the_longest_path_that_zeromq_binds_is_the_longest_allowed)
{
    /* sun_path holds 107 bytes and a NUL; ".gradients-out" is the longest ending. */
    const size_t longest = 107 - strlen (".gradients-out");
    char address[GQ_ENDPOINT_MAX * 2] = "ipc://";
    memset (address + 6, 'p', sizeof address - 7);
    address[6 + longest + 1] = '\0';
    expect_refused (address);
    address[6 + longest] = '\0';
    expect_control (address);
    cr_assert_eq (strlen (endpoints.gradients_out), 6 + 107);
}

Test (endpoint, no_host_is_cut_short)
{
    for (size_t length = 200; length < 2 * GQ_ENDPOINT_MAX; length++) {
        char address[3 * GQ_ENDPOINT_MAX] = "tcp://";
        memset (address + 6, 'h', length);
        snprintf (address + 6 + length, 16, ":65530");
        if (gq_endpoints_derive (&endpoints, address, NULL) != GQ_OK)
            continue;
        cr_assert_str_eq (endpoints.control, address);
        cr_assert_eq (strlen (endpoints.acks_out), strlen (address));
    }
}
